"""The mean where workers do not count the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..core.bucket import Bucket
from ..core.collectives import all_reduce
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, WrongType

Weight = float | Callable[[], float] | Callable[[Bucket], float]


@dataclass
class WeightedMean(Strategy):
    """sum(w_i * g_i) / sum(w_i), by one all-reduce of [w*g, w] per bucket.

    ``weight`` is this rank's number, or a function that is asked once per step, so that all buckets
    of a step agree: how many samples or tokens this rank has just seen, say. It may take the bucket
    (``lambda bucket: tokens[bucket.rank]``) or nothing. A rank with weight 0 is not counted, nor is
    one that has joined early. If all weights are 0 every rank raises.

    Gradients narrower than fp32 travel as fp32, because a sum of weights soon leaves their range.
    """

    weight: Weight = field(metadata={"per_rank": True})

    def __post_init__(self) -> None:
        self._asked: tuple[int, float] | None = None  # (step, weight)
        if not callable(self.weight):
            _checked(self.weight)
            self._takes_bucket = False
        else:
            self._takes_bucket = _takes_one_argument(self.weight)

    async def reduce(self, bucket: Bucket) -> Reduced:
        if bucket.flat.is_sparse:
            name = bucket.names[0]
            raise WrongType(
                f"WeightedMean cannot carry the sparse gradient of {name!r}; use a dense embedding, "
                f"or Route({{{name!r}: Mean()}}, otherwise=WeightedMean(...))"
            )
        flat = bucket.flat
        dtype = torch.promote_types(flat.dtype, torch.float32)
        weight = 0.0 if bucket.joined else self._weight(bucket)
        message = bucket.empty("weighted mean", flat.numel() + 1, dtype)
        # Not weight * nan: what a rank that does not count holds must not reach the others.
        if weight:
            message[:-1].copy_(flat).mul_(weight)
        else:
            message[:-1].zero_()
        message[-1] = weight
        total = await all_reduce(message, op="sum")
        weights = total[-1]
        if weights.device.type != "meta" and not weights > 0:
            raise InvalidValue(
                f"the weights of all {bucket.world} ranks add up to {weights.item():g} in step "
                f"{bucket.step}; at least one rank needs a weight above 0"
            )
        return Reduced(flat.copy_(total[:-1].div_(weights)))

    def _weight(self, bucket: Bucket) -> float:
        if not callable(self.weight):
            return self.weight
        if bucket.flat.device.type == "meta":
            return 1.0  # a dry run must not ask: the answer may not be there yet
        if self._asked is None or self._asked[0] != bucket.step or bucket.index == 0:
            value = self.weight(bucket) if self._takes_bucket else self.weight()  # type: ignore[call-arg]
            self._asked = (bucket.step, _checked(value))
        return self._asked[1]


def _checked(weight: object) -> float:
    try:
        value = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WrongType(
            f"weight is a {type(weight).__name__}; give a number, or a function that returns one"
        ) from None
    if not (math.isfinite(value) and value >= 0):
        raise InvalidValue(f"weight={value:g} is not possible; it must be finite and at least 0")
    return value


def _takes_one_argument(function: Callable[..., float]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin that tells nothing about itself
        return False
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1:
        raise WrongType(f"weight takes {len(needed)} arguments; it is called with the bucket or with none")
    return len(needed) == 1
