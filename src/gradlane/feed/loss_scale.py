"""Loss scaling: what a strategy sees and remembers is in the units of the loss itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..core.bucket import Bucket
from ..core.strategy import Reduced, Strategy, named_states
from ..errors import WrongType


class Scaler(Protocol):
    """``torch.amp.GradScaler``, or anything else that knows by what the loss was multiplied."""

    def get_scale(self) -> float: ...


def checked_scaler(given: Scaler | None) -> Scaler | None:
    if given is None or callable(getattr(given, "get_scale", None)):
        return given
    raise WrongType(
        f"scaler={given!r} has no get_scale(); pass the torch.amp.GradScaler that scales the loss"
    )


def unscaled(strategy: Strategy, scaler: Scaler | None) -> Strategy:
    """A scale moves between steps, so memory in scaled units would be wrong by the ratio. Strategies that
    remember nothing stay as they are: the scale keeps small gradients from vanishing in fp16."""
    if scaler is None or next(named_states(strategy), None) is None:
        return strategy
    scale = float(scaler.get_scale())
    return strategy if scale == 1.0 else _Unscaled(strategy, scale)


@dataclass
class _Unscaled(Strategy):
    inner: Strategy
    scale: float

    async def reduce(self, bucket: Bucket) -> Reduced:
        flat = bucket.flat
        wide = flat
        if (
            flat.dtype == torch.float16
        ):  # the scale is there because gradients would vanish in fp16 without it
            wide = bucket.empty("unscaled", flat.numel(), torch.float32).copy_(flat)
        wide.mul_(1 / self.scale)  # exact: a GradScaler's scale is a power of two
        reduced = await self.inner.reduce(replace(bucket, flat=wide))
        mean = reduced.mean.mul_(self.scale).detach()  # no more the bounded answer: it may be infinite
        return Reduced(mean if wide is flat else flat.copy_(mean))
