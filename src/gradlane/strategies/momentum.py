"""Momentum on the workers: what is sent moves slowly, so that what is wrong stands out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.bucket import Bucket
from ..core.memory import Memory
from ..core.numbers import is_number
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, WrongType
from ..kernels.finite import all_finite
from .shards import refuse_sparse


@dataclass
class WorkerMomentum(Strategy):
    """Every rank sends its own m = beta m + (1 - beta) g instead of its gradient g.

    Karimireddy et al., 2021, "Learning from history for Byzantine robust optimization": small attacks hide
    in the noise of single gradients, step after step; momentum takes most of it away before the ranks are
    compared. Use an optimizer without momentum: with a plain mean inside, this is an optimizer's momentum
    whose learning rate is lr / (1 - beta). Error feedback goes inside: the residual is residual of m.

    Its memory is one copy of the gradient, kept by parameter name. A gradient that is not finite is sent,
    for the others to see, and not remembered.
    """

    inner: Strategy
    beta: float = 0.9
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Strategy):
            got = type(self.inner).__name__
            raise WrongType(
                f"WorkerMomentum wraps a strategy, got {got}; write WorkerMomentum(Combined(...)), say"
            )
        if not is_number(self.beta) or not 0 <= self.beta < 1:
            raise InvalidValue(f"beta={self.beta!r} is not possible; use a number from 0 to below 1")
        self.memory = self.memory or Memory(torch.float32)

    async def reduce(self, bucket: Bucket) -> Reduced:
        assert self.memory is not None
        refuse_sparse(bucket, "WorkerMomentum")
        flat = bucket.flat
        kept, after = self.memory.buffers(bucket)
        moved = bucket.empty("momentum", flat.numel(), kept.dtype)
        torch.mul(kept, self.beta, out=moved).add_(flat, alpha=1 - self.beta)
        after.copy_(moved if all_finite(moved) else kept)
        flat.copy_(moved)
        return await self.inner.reduce(bucket)
