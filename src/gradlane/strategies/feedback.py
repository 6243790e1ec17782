"""Error feedback: what a lossy strategy leaves out is residual, and goes with the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import Codec, keep_finite
from ..core.bucket import Bucket
from ..core.collectives import note
from ..core.memory import Memory
from ..core.strategy import Reduced, Strategy, parts
from ..errors import InvalidValue, WrongType
from ..kernels.finite import all_finite
from .momentum import WorkerMomentum
from .private import refuse_private_inside
from .weighted import WeightedMean

KEPT_IN = (torch.float32, torch.bfloat16)
SAMPLE = 8_192  # elements looked at for the norm, at least
RUN = 16  # of them in a row
HOPELESS = 1e18  # the residual beyond this has squares that fp32 cannot add up


@dataclass
class ErrorFeedback(Strategy):
    """EF14 (Seide et al., 2014; Karimireddy et al., 2019): send C(g + e), keep e = g + e - C(g + e).

    What arrived and what all ranks keep is what was given, at any number of ranks. Exceptions: sums that a
    ``Cast`` inside rounds on the wire, a memory in bfloat16, which rounds, and what a robust rule leaves out.
    ``dtype`` is that of the memory, a copy of the gradient, and one to go back to.
    ``comm/residual_norm`` is its norm, estimated from a sample where a bucket is large.
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
        residual, residual_out = self.memory.buffers(bucket)
        reduced = await settled(self.inner, replace(bucket, residual=residual, residual_out=residual_out))
        if bucket.flat.device.type != "meta":
            await note(residual_square=residual_square(residual_out, bucket.step))
        return Reduced(reduced.mean, bounded=reduced.bounded)


async def settled(inner: Strategy, bucket: Bucket) -> Reduced:
    """The answer of a strategy to gradient and residual; ``bucket.residual_after`` takes the new residual."""
    if inner.fuses_feedback:  # in one pass with its own work
        return await inner.reduce(bucket)
    residual, residual_out, flat = bucket.residual, bucket.residual_after, bucket.flat
    assert residual is not None
    assert residual_out is not None
    whole = residual_out
    if residual_out.dtype == torch.bfloat16:  # the sum is rounded when it has been sent, not before
        whole = bucket.empty(
            "gradient and residual", flat.numel(), torch.promote_types(flat.dtype, torch.float32)
        )
    flat.copy_(torch.add(residual, flat, out=whole))
    reduced = await inner.reduce(replace(bucket, residual=None, residual_out=None, feedback=True))
    # Nothing lost, says a strategy without ``sent``: all but what the gradient's own width cut off.
    whole.sub_(whole.to(flat.dtype) if reduced.sent is None else reduced.sent())
    if whole is not residual_out:
        residual_out.copy_(whole)
    if residual_out.device.type != "meta":
        keep_finite(residual_out)
    return reduced


@dataclass
class EF21(Strategy):
    """EF21 (Richtarik et al., 2021): send what has changed, C(g - G), and add it to G on both sides.

    Each rank keeps its own estimate G, which the others know, and the mean of all, which is the answer:
    two copies of the gradient. What arrives is never old, as with EF14; in return every gradient
    is answered by an estimate that has yet to come up to it. The answer must be the mean of what the ranks
    sent (``Strategy.averages``), or both sides would drift apart: a robust rule and a ``Cast`` are refused.
    """

    inner: Strategy
    own: Memory | None = None
    mean: Memory | None = None

    def __post_init__(self) -> None:
        _check_inner(self.inner, "EF21")
        if not self.inner.averages:
            raise InvalidValue(
                f"EF21({type(self.inner).__name__}(...)): the answer inside is not the mean of "
                "what the ranks have sent, so estimates and answers would drift apart; use Gathered, Sharded "
                "or Summed with the mean, PowerSGD or AcpSGD, or take ErrorFeedback"
            )
        self.own = self.own or Memory(torch.float32)
        self.mean = self.mean or Memory(torch.float32, shared=True)

    async def reduce(self, bucket: Bucket) -> Reduced:
        assert self.own is not None
        assert self.mean is not None
        (own, own_after), (mean, mean_after) = self.own.buffers(bucket), self.mean.buffers(bucket)
        change = bucket.flat.sub_(own)
        whole = change.clone()  # the strategy inside may overwrite the bucket
        reduced = await self.inner.reduce(replace(bucket, feedback=True))
        # The mean of all estimates. Those who left early count in it, until they have taken theirs back.
        estimate = torch.add(mean, reduced.mean, alpha=bucket.divisor() / bucket.world)
        if all_finite(estimate):
            mean_after.copy_(estimate)
            torch.add(own, whole if reduced.sent is None else reduced.sent(), out=own_after)
            if not all_finite(own_after):  # it has passed the largest number, and the mean has not
                own_after.nan_to_num_(nan=0.0)
        else:  # all ranks see this, and stay with what they had: mean remains the mean of what each one has
            mean_after.copy_(mean)
            own_after.copy_(own)
        return Reduced(bucket.flat.copy_(estimate).mul_(bucket.world / bucket.divisor()))

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Own estimates are gone with their ranks: all begin with the mean of them, which is the answer."""
        state = super().carried(saved, rank, world)
        return {**state, "own": state["mean"]} if "mean" in state else state


def residual_square(residual: Tensor, step: int) -> Tensor:
    """The squared norm of the residual, for the metrics; less what is too large ever to be sent.

    One gradient of 3e38 can leave so much that every product with it is infinite, in this step and in all
    that follow: nothing would be finite again. Where that is so the norm is infinite too.
    """
    square = squared_norm(residual, step)
    if torch.isfinite(square):
        return square
    residual.masked_fill_(residual.abs() > HOPELESS, 0.0)
    return squared_norm(residual, step)


def squared_norm(residual: Tensor, step: int) -> Tensor:
    """Estimated from evenly spaced runs where there are many: the whole would be a pass over memory, and
    of single elements each would cost a line of the cache. Others in every step, and in time all."""
    numel, seen = residual.numel(), residual
    if numel > SAMPLE:
        apart = numel // (SAMPLE // RUN)
        rows = numel // apart
        first = step % 2 * (numel - rows * apart)  # or the last would never be seen
        start = min(step // 2 % -(-apart // RUN) * RUN, apart - RUN)
        seen = residual[first : first + rows * apart].view(rows, apart)[:, start : start + RUN]
    norm: Tensor = torch.linalg.vector_norm(seen, dtype=torch.promote_types(residual.dtype, torch.float32))
    return norm.float().square() * (numel / max(1, seen.numel()))


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
            f"{name} outside of WeightedMean would weigh the residual by a later step's weights; put it "
            f"inside: WeightedMean(weight, {name}(...))"
        )
    if any(isinstance(part, WorkerMomentum) for part in parts(inner)):
        raise InvalidValue(
            f"{name} outside of WorkerMomentum would take what the momentum holds back for a loss; put it "
            f"inside: WorkerMomentum({name}(...))"
        )
