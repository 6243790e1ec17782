"""Loss scaling: strategies see and remember gradients without the scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..core.bucket import Bucket
from ..core.strategy import Reduced, Strategy, named_states
from ..errors import WrongType


class Scaler(Protocol):
    """``torch.amp.GradScaler``, or anything else that knows the factor of the loss."""

    def get_scale(self) -> float: ...


def checked_scaler(scaler: Scaler | None) -> Scaler | None:
    if scaler is None or callable(getattr(scaler, "get_scale", None)):
        return scaler
    raise WrongType(
        f"scaler={scaler!r} has no get_scale(); pass the torch.amp.GradScaler that scales the loss"
    )


def unscaled(strategy: Strategy, scale: Callable[[], float]) -> Strategy:
    """Remove the scale around a strategy with memory: the scale changes between steps, so scaled memory would
    be wrong by the ratio. A strategy without memory stays as it is: the scale keeps small gradients from
    vanishing in fp16."""
    if next(named_states(strategy), None) is None:
        return strategy
    return strategy if (factor := scale()) == 1.0 else _Unscaled(strategy, factor)


@dataclass
class _Unscaled(Strategy):
    inner: Strategy
    scale: float

    async def reduce(self, bucket: Bucket) -> Reduced:
        flat = bucket.flat
        wide = flat
        if flat.dtype == torch.float16:  # without the scale, gradients would vanish in fp16
            wide = bucket.empty("unscaled", flat.numel(), torch.float32).copy_(flat)
        wide.mul_(1 / self.scale)  # exact: a GradScaler's scale is a power of two
        reduced = await self.inner.reduce(replace(bucket, flat=wide))
        mean = reduced.mean.mul_(self.scale).detach()  # may be infinite: it is not ``bounded`` any more
        return Reduced(mean if wide is flat else flat.copy_(mean))
