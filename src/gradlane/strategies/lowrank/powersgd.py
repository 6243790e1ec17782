"""PowerSGD: one power iteration a step, that goes on from the last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...core.bucket import Bucket
from ...core.memory import Memory
from ...core.strategy import Reduced, Strategy
from ...kernels.products import orthonormalise_all
from .factors import FactorMemory, keep_factors, kept_factor, narrowed_back
from .iteration import PowerIteration
from .partition import partition
from .rank import Rank, View, check_options, check_whole


@dataclass
class PowerSGD(Strategy):
    """PowerSGD (Vogels et al., 2019), for each gradient matrix M of a x b, the residual included:

    1. P = M Q, averaged over the ranks. Q is that of the last step. Gradients that are not matrices, or too
       small to gain by factors, travel dense in the same message.
    2. P is made orthonormal.
    3. Q = M^T P, averaged.
    4. The answer is P Q^T: r (a + b) numbers were sent instead of a b.

    Wrap it in ``ErrorFeedback``. The residual of a rank is then M less P (M^T P)^T with its *own* M^T P, and
    stays bounded. (The paper and torch subtract the averaged product; that residual grows with the root of
    the steps.) Dense parts leave no residual.

    ``rank`` is a number, a dict of name patterns (a name that none of them matches is dense), or a function
    of name and shape. A matrix travels as factors where that saves more than ``min_compression_rate``.
    ``view="bucket"`` makes one nearly square matrix of the whole bucket. Gradients in fp16 and bf16 are
    computed in fp32.
    """

    rank: Rank = 4
    min_compression_rate: float = 2
    iterations: int = 1
    warm_start: bool = True
    view: View = "tensor"
    seed: int = 0
    factors: Memory = field(init=False, default_factory=FactorMemory)
    """Q of the last step, by matrix; empty without ``warm_start``."""
    fuses_feedback: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options("PowerSGD", self.rank, self.min_compression_rate, self.view, self.seed)
        check_whole("PowerSGD", "iterations", self.iterations, least=1)

    @property
    def averages(self) -> bool:
        return True

    async def reduce(self, bucket: Bucket) -> Reduced:
        parts = partition(bucket, self.rank, self.min_compression_rate, self.view)
        step = PowerIteration(bucket, parts)
        memory = self.factors if self.warm_start else FactorMemory()
        qs = [kept_factor(memory, bucket, m, m.columns, self.seed) for m in parts.matrices]
        for iteration in range(self.iterations):
            last = iteration == self.iterations - 1
            await step.rows(qs, first=iteration == 0)  # 1, 2
            if not parts.matrices:
                break
            qs = await step.columns(last=last)  # 3
            if not last:
                orthonormalise_all(qs)  # as large as M now: a product with M would be as large as its square
        step.answer(qs)  # 4
        if self.warm_start:
            usable = [(m, q) for m, q, finite in zip(parts.matrices, qs, step.finite, strict=True) if finite]
            keep_factors(memory, usable)
        return Reduced(narrowed_back(bucket, step.flat), step.sent(), step.bounded())
