"""PowerSGD: one power iteration a step, that goes on from the last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...core.bucket import Bucket
from ...core.collectives import note
from ...core.memory import Memory
from ...core.numbers import is_number
from ...core.strategy import Reduced, Strategy
from ...errors import InvalidValue
from ...kernels.products import orthonormalise_all
from .factors import FactorMemory, keep_factors, kept_factor, narrowed_back
from .iteration import Owes, Step
from .matrices import Cut, Rank, View, check_common, check_whole, cut
from .rankplan import RankPlan, cut_within

RANK = 4  # where none is asked for
MOST = 32  # the same, for one layer within a budget


@dataclass
class PowerSGD(Strategy):
    """PowerSGD (Vogels et al., 2019), for each gradient matrix M of a x b, the residual included:

    1. P = M Q, averaged over the ranks. Q is that of the last step. What is no matrix, or too small to
       gain by it, rides in the same message as it is.
    2. P is made orthonormal.
    3. Q = M^T P, averaged.
    4. The answer is P Q^T: r (a + b) numbers were sent instead of a b.

    Wrap it in ``ErrorFeedback``. What a rank owes then is M less P (M^T P)^T with its *own* M^T P, and stays
    bounded; ``owes="mean"`` takes the averaged one, as the paper and torch have it, and grows with the
    root of the steps. Dense parts owe nothing.

    ``rank`` (4) is a number, a dict of name patterns (what none of them matches is dense), or a function of
    name and shape. A matrix travels as factors where that saves more than ``min_compression_rate``.
    ``view="bucket"`` makes one nearly square matrix of the whole bucket. Gradients of fp16 and bf16 are
    computed with in fp32.

    ``budget=0.01`` chooses the ranks: a hundredth of the gradient's elements may travel in a step, the dense
    ones and all iterations counted, and every ``every`` steps ranks are shared out anew so that they carry
    the most energy. ``rank`` (32) is then the largest that a matrix may have. ``ranks()`` tells them,
    ``comm/step/ranks`` is their sum.
    """

    rank: Rank | None = None
    min_compression_rate: float = 2
    iterations: int = 1
    warm_start: bool = True
    view: View = "tensor"
    owes: Owes = "own"
    seed: int = 0
    budget: float | None = None
    every: int = 100
    factors: Memory | None = field(default=None, metadata={"state": True})
    plan: RankPlan | None = field(default=None, metadata={"state": True})
    fuses_feedback: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.rank = self._rank  # so that a record tells it, whatever None will mean later
        check_common("PowerSGD", self._rank, self.min_compression_rate, self.view, self.seed)
        check_whole("PowerSGD", "iterations", self.iterations, least=1)
        if self.owes not in ("own", "mean"):
            raise InvalidValue(f"PowerSGD owes={self.owes!r}; use 'own', or 'mean' as torch does")
        check_whole("PowerSGD", "every", self.every, least=1)
        if self.warm_start:
            self.factors = self.factors or FactorMemory()
        if self.budget is not None:
            if not is_number(self.budget) or not 0 < self.budget < 1:
                raise InvalidValue(
                    f"PowerSGD budget={self.budget!r}; use a share of the gradient's elements between 0 and 1"
                )
            self.plan = self.plan or RankPlan(self.budget, self.every)

    @property
    def averages(self) -> bool:
        return True

    async def reduce(self, bucket: Bucket) -> Reduced:
        step = Step(bucket, self._cut(bucket), self.owes)
        memory = self.factors if self.warm_start and self.factors is not None else Memory()
        qs = [kept_factor(memory, bucket, m, m.columns, self.seed) for m in step.cut.matrices]
        for remaining in reversed(range(self.iterations)):
            await step.rows(qs)  # 1, 2
            if not step.cut.matrices:
                break
            qs = await step.columns(last=not remaining)  # 3
            if remaining:
                orthonormalise_all(qs)  # as large as M now: a product with M would be as large as its square
        step.answer(qs)  # 4
        usable = [(m, q) for m, q, fine in zip(step.cut.matrices, qs, step.fine, strict=True) if fine]
        if self.warm_start:
            keep_factors(memory, usable)
        if self.plan is not None:
            self.plan.saw(bucket, usable)
            await note(ranks=sum(matrix.rank for matrix in step.cut.matrices))
        return Reduced(narrowed_back(bucket, step.flat), step.sent(), step.bounded())

    def ranks(self) -> dict[str, int]:
        """The ranks that the budget gave, by name of parameter; none before the first step."""
        return self.plan.in_force() if self.plan else {}

    @property
    def _rank(self) -> Rank:
        if self.rank is not None:
            return self.rank
        return RANK if self.budget is None else MOST

    def _cut(self, bucket: Bucket) -> Cut:
        if self.plan is None:
            return cut(bucket, self._rank, self.min_compression_rate, self.view)
        return cut_within(
            self.plan, bucket, self._rank, self.min_compression_rate, self.view, self.iterations
        )
