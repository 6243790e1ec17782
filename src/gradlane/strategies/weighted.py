"""The mean where workers do not count the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate.mean import mean
from ..core.bucket import Bucket
from ..core.collectives import all_gather, all_reduce
from ..core.numbers import is_number
from ..core.strategy import Reduced, Strategy
from ..core.streams import has_streams
from ..errors import InvalidValue, WrongType
from .combined import Combined
from .device_weights import LastTotal, shares_on_device
from .feedback import EF21, ErrorFeedback
from .mean import Mean
from .nesting import check_wrapped
from .weights import ROUNDING, RankWeight, StepWeight, Weight, shares


@dataclass
class WeightedMean(Strategy):
    """sum(w_i * g_i) / sum(w_i), carried by any strategy that takes a mean.

    ``weight`` is this rank's number, a function that is called once per step, so that all buckets of a step
    agree (how many samples this rank has just seen, say), or a ``TokenCount``. A function may take the bucket
    (``lambda bucket: tokens[bucket.rank]``) or nothing. A rank with weight 0 does not count, nor does one
    that has joined early. If all weights are 0 every rank raises; on a device the answer is NaN, and the next
    step raises, because the host does not wait for the weights.

    With the plain mean inside there is one all-reduce of [w*g, w] per bucket, in fp32 at least. With any
    other, inside a ``Cast``, or with ``max_share``, the weights go first in a message of their own, 8 bytes
    to each rank, and ``inner`` gets n * w_i / sum(w) * g_i, in fp32 at least.

    ``max_share`` is the largest share of the sum of weights that a rank may have, where weights are not to be
    trusted: see ``shares``. Feedback belongs inside, ``WeightedMean(w, ErrorFeedback(...))``: the residual
    was weighed in its own step, and is not weighed again.
    """

    weight: Weight = field(metadata={"per_rank": True})
    inner: Strategy = field(default_factory=Mean)
    max_share: float | None = None
    keeps_privacy: ClassVar[bool] = False
    _step_weight: StepWeight = field(init=False, repr=False, compare=False)
    _last_total: LastTotal = field(init=False, default_factory=LastTotal, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._step_weight = StepWeight(self.weight)
        if self.max_share is not None and not (is_number(self.max_share) and 0 < self.max_share <= 1):
            raise InvalidValue(
                f"max_share={self.max_share!r}; it is a share of the sum of weights, above 0 and at most 1"
            )
        check_wrapped(self, self.inner, "WeightedMean(weight, Mean())")

    def refuses_inside(self, part: Strategy) -> str | None:
        if isinstance(part, Combined):
            return (
                "Combined inside WeightedMean would leave ranks out, and their weights would be missing from "
                "the sum; write WeightedMean(weight, Sharded(...)), or leave the weights out"
            )
        if getattr(part, "aggregate", mean) is not mean:
            return (
                f"WeightedMean weighs what a mean adds up, and the {type(part).__name__} inside it takes "
                "another aggregate of the weighted gradients; use its default, or leave the weights out"
            )
        return None

    def refuses_around(self, wrapper: Strategy) -> str | None:
        name = type(wrapper).__name__
        if isinstance(wrapper, WeightedMean):
            return "WeightedMean inside WeightedMean; multiply the weights, and use one"
        if isinstance(wrapper, ErrorFeedback | EF21):
            return (
                f"{name} outside of WeightedMean would weigh the residual by a later step's weights; put it "
                f"inside: WeightedMean(weight, {name}(...))"
            )
        return None

    def check_world(self, world: int) -> None:
        """A single rank has all of the weight, whatever ``max_share`` says."""
        if self.max_share is not None and world > 1 and self.max_share * world < 1 - ROUNDING:
            raise InvalidValue(
                f"max_share={self.max_share:g} is not possible with {world} ranks, whose shares add up to "
                f"1; use at least 1/{world}"
            )

    async def reduce(self, bucket: Bucket) -> Reduced:
        _check_bucket(bucket)
        own = self._step_weight.of(bucket)
        if type(self.inner) is Mean and self.max_share is None and not _narrowed(bucket):
            return Reduced(await self._in_one_message(bucket, own))
        flat = bucket.flat
        wide = await self._weighted(bucket, own)
        reduced = await self.inner.reduce(replace(bucket, flat=wide))
        return Reduced(reduced.mean if wide is flat else flat.copy_(reduced.mean))

    @property
    def scatters(self) -> bool:
        return self.inner.scatters

    async def scatter(self, bucket: Bucket) -> Tensor:
        wide = await self._weighted(bucket, self._step_weight.of(bucket))
        part = await self.inner.scatter(replace(bucket, flat=wide))
        return part.to(bucket.flat.dtype)

    async def _weighted(self, bucket: Bucket, own: RankWeight) -> Tensor:
        """This rank's part of a plain mean, in fp32 at least."""
        factor = await self._factor(bucket, own)
        wide = bucket.flat
        if (dtype := _wide(wide)) != wide.dtype:
            wide = bucket.empty("weighted", wide.numel(), dtype).copy_(wide)
        # Not 0 * nan: the gradient of a rank that does not count must not reach the others.
        if own.weight:
            return wide.mul_(factor)
        return wide.fill_(factor) if isinstance(factor, Tensor) else wide.zero_()

    async def _factor(self, bucket: Bucket, own: RankWeight) -> float | Tensor:
        """The factor that makes this rank's gradient its part of a plain mean; 0 or, where nobody counts, NaN
        for a rank that does not count."""
        self.check_world(bucket.world)
        self._refuse_last_step(bucket)
        # The bits of a double as an integer: no ``Cast`` around narrows it.
        bits = torch.full((1,), own.weight, dtype=torch.float64, device=bucket.flat.device).view(torch.int64)
        everyone = await all_gather((bits,))
        if bits.device.type == "meta":
            return 1.0
        gathered = torch.cat([row for (row,) in everyone]).view(torch.float64)
        if has_streams(gathered.device):
            self._last_total.keep(gathered.sum(), bucket.step)
            share_of_it = shares_on_device(gathered, self.max_share)[bucket.rank]
            return share_of_it * (bucket.divisor() * (own.factor / own.weight) if own.weight else 0.0)
        weights = gathered.tolist()
        if not any(weights):
            raise _nobody_counts(bucket.world, bucket.step, 0.0)
        if not own.weight:
            return 0.0
        share = shares(weights, self.max_share)[bucket.rank]
        return share * bucket.divisor() * (own.factor / own.weight)

    async def _in_one_message(self, bucket: Bucket, own: RankWeight) -> Tensor:
        self._refuse_last_step(bucket)
        flat = bucket.flat
        message = bucket.empty("weighted mean", flat.numel() + 1, _wide(flat))
        if own.weight:
            message[:-1].copy_(flat).mul_(own.factor)
        else:
            message[:-1].zero_()
        message[-1] = own.weight
        total = await all_reduce(message, op="sum")
        weights = total[-1]
        if has_streams(weights.device):
            self._last_total.keep(weights, bucket.step)
        elif weights.device.type != "meta" and not weights > 0:
            raise _nobody_counts(bucket.world, bucket.step, weights.item())
        return flat.copy_(total[:-1].div_(weights))

    def _refuse_last_step(self, bucket: Bucket) -> None:
        step = self._last_total.take_step_without_weights(bucket.step)
        if step is not None:
            raise _nobody_counts(bucket.world, step, 0.0)


def _wide(flat: Tensor) -> torch.dtype:
    return torch.promote_types(flat.dtype, torch.float32)


def _narrowed(bucket: Bucket) -> bool:
    """Whether a ``Cast`` around would round the weights of a common message."""
    return bucket.wire is not None and bucket.wire.itemsize < _wide(bucket.flat).itemsize


def _nobody_counts(world: int, step: int, total: float) -> InvalidValue:
    return InvalidValue(
        f"the weights of all {world} ranks add up to {total:g} in step {step}; at least one rank needs a "
        "weight above 0"
    )


def _check_bucket(bucket: Bucket) -> None:
    if bucket.flat.is_sparse:
        name = bucket.names[0]
        raise WrongType(
            f"WeightedMean cannot carry the sparse gradient of {name!r}; use a dense embedding, "
            f"or Route({{{name!r}: Mean()}}, otherwise=WeightedMean(...))"
        )
    if bucket.feedback is not None:
        raise InvalidValue(
            "feedback outside of WeightedMean would weigh the residual by a later step's weights; "
            "put it inside: WeightedMean(weight, ErrorFeedback(...))"
        )
