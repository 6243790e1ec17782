"""Momentum on the workers: honest ranks then send similar vectors, and wrong ones stand out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..core.bucket import Bucket
from ..core.memory import Memory
from ..core.numbers import is_number
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue
from ..kernels.finite import choose, finite_flag
from .checks import refuse_sparse
from .feedback import EF21, ErrorFeedback
from .nesting import check_wrapped


@dataclass
class WorkerMomentum(Strategy):
    """Every rank sends its own m = beta m + (1 - beta) g instead of its gradient g.

    Karimireddy et al., 2021, "Learning from history for Byzantine robust optimization": small attacks hide
    in the noise of single gradients, step after step; momentum takes most of it away before the ranks are
    compared. Use an optimizer without momentum: with a plain mean inside, this is an optimizer's momentum
    whose learning rate is lr / (1 - beta). Error feedback goes inside: its residual is a part of m.

    Its memory is one copy of the gradient, kept by parameter name. A non-finite gradient is sent, so that the
    others see it, and not remembered.
    """

    inner: Strategy
    beta: float = 0.9
    memory: Memory = field(init=False, default_factory=lambda: Memory(torch.float32))

    def __post_init__(self) -> None:
        check_wrapped(self, self.inner, "WorkerMomentum(Combined(...)), say")
        if not is_number(self.beta) or not 0 <= self.beta < 1:
            raise InvalidValue(f"beta={self.beta!r} is not possible; use a number from 0 to below 1")

    def refuses_around(self, wrapper: Strategy) -> str | None:
        if not isinstance(wrapper, ErrorFeedback | EF21):
            return None
        name = type(wrapper).__name__
        return (
            f"{name} outside of WorkerMomentum would take what the momentum holds back for a loss; put it "
            f"inside: WorkerMomentum({name}(...))"
        )

    async def reduce(self, bucket: Bucket) -> Reduced:
        refuse_sparse(bucket, "WorkerMomentum")
        flat = bucket.flat
        momentum, momentum_out = self.memory.buffers(bucket)
        moved = bucket.empty("momentum", flat.numel(), momentum.dtype)
        torch.mul(momentum, self.beta, out=moved).add_(flat, alpha=1 - self.beta)
        choose(finite_flag(moved), moved, momentum, momentum_out)
        flat.copy_(moved)
        return await self.inner.reduce(bucket)
