"""Error feedback: what a lossy strategy leaves out is kept as the residual, and sent with the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..codecs.base import Codec, keep_finite
from ..core.bucket import Bucket, Feedback
from ..core.collectives import note
from ..core.memory import Memory
from ..core.numbers import is_number
from ..core.strategy import Reduced, Strategy
from ..core.streams import has_streams
from ..errors import InvalidValue, WrongType
from ..kernels.elementwise import drop_huge
from ..kernels.finite import all_finite, choose, finite_flag
from .nesting import check_wrapped
from .sampling import sample_of

MEMORY_DTYPES = (torch.float32, torch.bfloat16)
SLOWEST_BF16_DECAY = 1 - 2**-8  # a slower one changes less than half a unit in the last place of bfloat16
LARGEST_RESIDUAL = 1e18  # fp32 cannot add up the squares of larger ones


@dataclass
class ErrorFeedback(Strategy):
    """EF14 (Seide et al., 2014; Karimireddy et al., 2019): send C(g + e), keep e = g + e - C(g + e).

    At any number of ranks, what arrived plus what all ranks keep is the sum of all gradients. Exceptions:
    sums that a ``Cast`` inside rounds on the wire, a memory in bfloat16, which rounds, what a robust rule
    leaves out, and what ``decay`` forgets. The memory, of type ``dtype``, is one copy of the gradient, and a
    second one to go back to when a step fails. ``comm/residual_norm`` is its norm, estimated from a sample
    where a bucket is large.

    ``decay`` below 1 multiplies the residual in each step (SparseLoCo, Sarfi et al., 2025: 0.95). What waits
    for long belongs to weights of long ago, and fades. What arrived, what is kept and what has decayed then
    add up to the gradients.
    """

    inner: Strategy
    dtype: torch.dtype = torch.float32
    decay: float = 1.0
    memory: Memory = field(init=False)
    keeps_privacy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in MEMORY_DTYPES:
            raise InvalidValue(f"ErrorFeedback dtype={self.dtype}; use float32 or bfloat16")
        if not is_number(self.decay) or not 0 < self.decay <= 1:
            raise InvalidValue(
                f"ErrorFeedback decay={self.decay!r}; use a factor above 0 and up to 1, such as 0.95"
            )
        if self.dtype == torch.bfloat16 and SLOWEST_BF16_DECAY < self.decay < 1:
            raise InvalidValue(
                f"ErrorFeedback decay={self.decay}: a memory in bfloat16 rounds it away; use at most "
                f"{SLOWEST_BF16_DECAY:.3f}, 1, or float32"
            )
        self.memory = Memory(self.dtype)
        check_wrapped(self, self.inner, _example("ErrorFeedback", self.inner))

    def refuses_inside(self, part: Strategy) -> str | None:
        return _two_residuals(self, part)

    async def reduce(self, bucket: Bucket) -> Reduced:
        """With g the gradient, e the residual and C what the strategy inside sends of a gradient:

            p  = g + e
            send C(p)
            e' = p - C(p)

        A strategy that ``fuses_feedback`` computes the three lines itself, in one pass over memory. With
        ``decay`` the memory holds decay * e': that of the next step has decayed by then.
        """
        e, e_out = self.memory.buffers(bucket)
        if self.inner.fuses_feedback:
            reduced = await self.inner.reduce(replace(bucket, feedback=Feedback(e, e_out)))
        else:
            g = bucket.flat
            p = torch.add(g, e, out=_sum_buffer(bucket, e_out))
            g.copy_(p)
            reduced = await self.inner.reduce(replace(bucket, feedback=Feedback(want_sent=True)))
            # A strategy without ``sent`` lost nothing of g, which is p in the gradient's own width.
            sent = p.to(g.dtype) if reduced.sent is None else reduced.sent()
            _keep(p.sub_(sent), e_out)
        if self.decay != 1:
            e_out.mul_(self.decay)
        if not bucket.flat.is_meta:
            await note(residual_square=residual_square(e_out, bucket.step))
        return Reduced(reduced.mean, bounded=reduced.bounded)


def _sum_buffer(bucket: Bucket, residual_out: Tensor) -> Tensor:
    """Where p is computed: in the new residual itself, unless that is bfloat16, which would round p."""
    if residual_out.dtype != torch.bfloat16:
        return residual_out
    wide = torch.promote_types(bucket.flat.dtype, torch.float32)
    return bucket.empty("gradient and residual", bucket.flat.numel(), wide)


def _keep(residual: Tensor, residual_out: Tensor) -> None:
    if residual is not residual_out:
        residual_out.copy_(residual)
    if not residual_out.is_meta:
        keep_finite(residual_out)


@dataclass
class EF21(Strategy):
    """EF21 (Richtarik et al., 2021): send what has changed, C(g - G), and add it to G on both sides.

    Each rank keeps its own estimate G, which the others know, and the mean of all estimates, which is the
    answer: two copies of the gradient. Unlike with EF14, an answer contains no gradients of earlier steps;
    in return it is an estimate that still has to approach the gradient. The answer must be the mean of what
    the ranks sent (``Strategy.averages``), or both sides would drift apart: a robust rule and a ``Cast`` are
    refused.
    """

    inner: Strategy
    own: Memory = field(init=False, default_factory=lambda: Memory(torch.float32))
    mean: Memory = field(init=False, default_factory=lambda: Memory(torch.float32, shared=True))
    keeps_privacy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_wrapped(self, self.inner, _example("EF21", self.inner))

    def refuses_inside(self, part: Strategy) -> str | None:
        if (reason := _two_residuals(self, part)) is not None:
            return reason
        if part is not self.inner or part.averages:
            return None
        return (
            f"EF21({type(part).__name__}(...)): the answer inside is not the mean of what the ranks have "
            "sent, so estimates and answers would drift apart; use Gathered, Sharded or Summed with the "
            "mean, PowerSGD or AcpSGD, or take ErrorFeedback"
        )

    async def reduce(self, bucket: Bucket) -> Reduced:
        (own, own_out), (mean, mean_out) = self.own.buffers(bucket), self.mean.buffers(bucket)
        change = bucket.flat.sub_(own).clone()  # the strategy inside may overwrite the bucket
        reduced = await self.inner.reduce(replace(bucket, feedback=Feedback(want_sent=True)))
        # The mean of all estimates. Ranks that joined early count in it, until they have taken theirs back.
        estimate = torch.add(mean, reduced.mean, alpha=bucket.divisor() / bucket.world)
        # If it is not finite all ranks see this and keep what they had: mean remains that of their estimates.
        finite = finite_flag(estimate)
        choose(finite, estimate, mean, mean_out)
        if finite is False:
            own_out.copy_(own)
        else:
            sent = change if reduced.sent is None else reduced.sent()
            moved = torch.add(own, sent, out=own_out) if finite is True else own + sent
            if finite is not True or not all_finite(moved):  # it may overflow where the mean does not
                moved.nan_to_num_(nan=0.0)
            if finite is not True:
                choose(finite, moved, own, own_out)
        return Reduced(bucket.flat.copy_(estimate).mul_(bucket.world / bucket.divisor()))

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """With other ranks, all begin with the mean of the old estimates, which is the answer."""
        state = super().carried(saved, rank, world)
        return {**state, "own": state["mean"]} if "mean" in state else state


def residual_square(residual: Tensor, step: int) -> Tensor:
    """The squared norm of the residual, for the metrics. Elements too large ever to be sent are dropped.

    One gradient of 3e38 can leave a residual with which every product is infinite, in this step and in all
    later ones. Where that is so the norm is infinite too.
    """
    square = squared_norm(residual, step)
    if has_streams(residual.device):
        drop_huge(residual, square, LARGEST_RESIDUAL)
    elif torch.isfinite(square):
        return square
    else:
        residual.masked_fill_(residual.abs() > LARGEST_RESIDUAL, 0.0)
    return squared_norm(residual, step)


def squared_norm(residual: Tensor, step: int) -> Tensor:
    """Estimated from a sample where there are many elements; every step takes another one."""
    sample = sample_of(residual, step)
    norm: Tensor = torch.linalg.vector_norm(sample, dtype=torch.promote_types(residual.dtype, torch.float32))
    return norm.float().square() * (residual.numel() / max(1, sample.numel()))


def _two_residuals(wrapper: Strategy, part: Strategy) -> str | None:
    if not isinstance(part, ErrorFeedback | EF21):
        return None
    outer, inner = type(wrapper).__name__, type(part).__name__
    return (
        f"{outer}(... {inner}(...)): the inner one keeps what is lost, nothing is left for {outer}; use one"
    )


def _example(name: str, inner: object) -> str:
    if isinstance(inner, Codec):
        codec = type(inner).__name__
        raise WrongType(
            f"{name} wraps a strategy, and {codec} is a codec; write {name}(Sharded({codec}(...)))"
        )
    return f"{name}(Gathered(TopK(0.01))), say"
