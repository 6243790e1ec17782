"""Error feedback: what a lossy strategy leaves out is owed, and goes with the next step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..codecs.base import Codec, keep_finite
from ..core.bucket import Bucket
from ..core.collectives import note
from ..core.memory import Memory
from ..core.strategy import Reduced, Strategy, parts
from ..errors import InvalidValue, WrongType
from .momentum import WorkerMomentum
from .private import refuse_private_inside
from .weighted import WeightedMean

KEPT_IN = (torch.float32, torch.bfloat16)
SAMPLE = 16_384  # elements looked at for the norm, at least
HOPELESS = 1e18  # what is owed beyond this has squares that fp32 cannot add up


@dataclass
class ErrorFeedback(Strategy):
    """EF14 (Seide et al., 2014; Karimireddy et al., 2019): send C(g + e), keep e = g + e - C(g + e).

    What was sent and what is owed add up to the gradients, always. ``dtype`` is that of the memory, one
    copy of the gradient: bfloat16 halves it and rounds what is owed. ``comm/residual_norm`` is its
    norm, estimated from a sample where a bucket is large.
    """

    inner: Strategy
    dtype: torch.dtype = torch.float32
    memory: Memory | None = None

    def __post_init__(self) -> None:
        _check_inner(self.inner, "ErrorFeedback")
        if self.dtype not in KEPT_IN:
            raise InvalidValue(f"ErrorFeedback dtype={self.dtype}; use float32 or bfloat16")
        if self.memory is None:
            self.memory = Memory(self.dtype)

    async def reduce(self, bucket: Bucket) -> Reduced:
        assert self.memory is not None
        owed = self.memory.like(bucket)
        if self.inner.settles:  # in one pass with its own work
            reduced = await self.inner.reduce(replace(bucket, owed=owed))
        else:
            owed.add_(bucket.flat)
            bucket.flat.copy_(owed)
            reduced = await self.inner.reduce(replace(bucket, feedback=True))
            # Nothing lost, says a strategy without ``sent``: all but what the gradient's own width cut off.
            owed.sub_(owed.to(bucket.flat.dtype) if reduced.sent is None else reduced.sent())
            if owed.device.type != "meta":
                keep_finite(owed)
        if bucket.flat.device.type != "meta":
            await note(residual_square=residual(owed, bucket.step))
        return Reduced(reduced.mean)


@dataclass
class ErrorFeedback21(Strategy):
    """EF21 (Richtarik et al., 2021): send what has changed, C(g - G), and add it to G on both sides.

    Each rank keeps its own estimate G, which the others know, and the mean of all, which is the answer:
    two copies of the gradient. What arrives is never old, as with EF14; in return every gradient
    is answered by an estimate that has yet to come up to it.
    """

    inner: Strategy
    own: Memory | None = None
    mean: Memory | None = None

    def __post_init__(self) -> None:
        _check_inner(self.inner, "ErrorFeedback21")
        self.own = self.own or Memory(torch.float32)
        self.mean = self.mean or Memory(torch.float32)

    async def reduce(self, bucket: Bucket) -> Reduced:
        assert self.own is not None
        assert self.mean is not None
        own, mean = self.own.like(bucket), self.mean.like(bucket)
        change = bucket.flat.sub_(own)
        whole = change.clone()  # the strategy inside may overwrite the bucket
        reduced = await self.inner.reduce(replace(bucket, feedback=True))
        own.add_(whole if reduced.sent is None else reduced.sent())
        mean.add_(reduced.mean)
        bucket.flat.copy_(mean)
        if mean.device.type != "meta":
            forget_where_lost(bucket.flat, own, mean)
            if not torch.isfinite(own.sum()):  # it has passed the largest number, and the mean has not
                own.nan_to_num_(nan=0.0)
        return Reduced(bucket.flat)


def forget_where_lost(answer: Tensor, *memories: Tensor) -> None:
    """Begin again at 0 where the answer is not finite; all ranks together, for all have the same answer."""
    if not torch.isfinite(answer.sum()):
        lost = answer.isfinite().logical_not_()
        for memory in memories:
            memory.masked_fill_(lost, 0.0)


def residual(owed: Tensor, step: int) -> Tensor:
    """The squared norm of what is owed, for the metrics; less what is too large ever to be sent.

    One gradient of 3e38 can leave so much that every product with it is infinite, in this step and in all
    that follow: nothing would be finite again. Where that is so the norm is infinite too.
    """
    square = squared_norm(owed, step)
    if torch.isfinite(square):
        return square
    owed.masked_fill_(owed.abs() > HOPELESS, 0.0)
    return squared_norm(owed, step)


def squared_norm(owed: Tensor, step: int) -> Tensor:
    """Estimated from evenly spaced elements where there are many: the whole would be a pass over memory."""
    stride = max(1, owed.numel() // SAMPLE)
    seen = owed[step % stride :: stride].float()
    return seen.dot(seen) * (owed.numel() / max(1, seen.numel()))


def _check_inner(inner: object, name: str) -> None:
    if isinstance(inner, Codec):
        codec = type(inner).__name__
        raise WrongType(
            f"{name} wraps a strategy, and {codec} is a codec; write {name}(Sharded({codec}(...)))"
        )
    if not isinstance(inner, Strategy):
        got = type(inner).__name__
        raise WrongType(f"{name} wraps a strategy, got {got}; write {name}(Gathered(TopK(0.01))), say")
    refuse_private_inside(name, inner)
    if any(isinstance(part, WeightedMean) for part in parts(inner)):
        raise InvalidValue(
            f"{name} outside of WeightedMean would weigh what is owed by a later step's weights; put it "
            f"inside: WeightedMean(weight, {name}(...))"
        )
    if any(isinstance(part, WorkerMomentum) for part in parts(inner)):
        raise InvalidValue(
            f"{name} outside of WorkerMomentum would take what the momentum holds back for a loss; put it "
            f"inside: WorkerMomentum({name}(...))"
        )
