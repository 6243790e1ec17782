"""PowerSGD: one power iteration a step, that goes on from the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...core.bucket import Bucket
from ...core.collectives import all_reduce, note
from ...core.memory import Memory
from ...core.numbers import is_number, is_small
from ...core.strategy import Reduced, Strategy
from ...errors import InvalidValue
from ...kernels.finite import all_finite
from ...kernels.narrow_debt import add_debt, leave_debt
from ...kernels.products import expand, orthonormalise_all, project_columns, project_rows
from .cut import Cut, Rank, View, check_common, check_whole, cut
from .factors import (
    FactorMemory,
    Message,
    keep_factors,
    kept_factor,
    message_for,
    message_in,
    narrowed_back,
    widened,
)
from .rankplan import RankPlan, cut_within

Owes = Literal["own", "mean"]
RANK = 4  # where none is asked for
MOST = 32  # the same, for one layer within a budget


@dataclass
class PowerSGD(Strategy):
    """PowerSGD (Vogels et al., 2019), for each gradient matrix M of a x b, what is owed included:

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
    factors: Memory | None = None
    plan: RankPlan | None = None
    settles: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_common("PowerSGD", self._rank, self.min_compression_rate, self.view, self.seed)
        check_whole("PowerSGD", "iterations", self.iterations, least=1)
        if self.owes not in ("own", "mean"):
            raise InvalidValue(f"PowerSGD owes={self.owes!r}; use 'own', or 'mean' as torch does")
        check_whole("PowerSGD", "every", self.every, least=1)
        self.factors = self.factors or FactorMemory()
        if self.budget is not None:
            if not is_number(self.budget) or not 0 < self.budget < 1:
                raise InvalidValue(
                    f"PowerSGD budget={self.budget!r}; use a share of the gradient's elements between 0 and 1"
                )
            self.plan = self.plan or RankPlan(self.budget, self.every)

    async def reduce(self, bucket: Bucket) -> Reduced:
        assert self.factors is not None
        step = _Step(bucket, self._cut(bucket), self.owes)
        memory = self.factors if self.warm_start else Memory()
        qs = [kept_factor(memory, bucket, m, m.columns, self.seed) for m in step.cut.matrices]
        for left in reversed(range(self.iterations)):
            await step.rows(qs)  # 1, 2
            if not step.cut.matrices:
                break
            qs = await step.columns(last=not left)  # 3
            if left:
                orthonormalise_all(qs)  # as large as M now: a product with M would be as large as its square
        step.answer(qs)  # 4
        sound = [(m, q) for m, q, fine in zip(step.cut.matrices, qs, step.fine, strict=True) if fine]
        if self.warm_start:
            keep_factors(memory, sound)
        if self.plan is not None:
            self.plan.saw(bucket, sound)
            await note(ranks=sum(matrix.rank for matrix in step.cut.matrices))
        return Reduced(narrowed_back(bucket, step.flat), step.sent(), step.sound())

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


class _Step:
    """One bucket on its way through the algorithm."""

    def __init__(self, bucket: Bucket, cut: Cut, owes: Owes) -> None:
        self.bucket, self.cut = bucket, cut
        self.flat, self.owed, self.left = widened(bucket), bucket.owed, bucket.owed_after
        self.own = owes == "own"
        self.narrow = self.owed is not None and self.owed.dtype != self.flat.dtype
        """The debt is of another width: it is added at once, and left by ``leave_debt``."""
        self.ps: list[Tensor] = []
        self.fine = [True] * len(cut.matrices)
        """Per matrix: all numbers so far are finite. They come from the wire, so all ranks see the same."""
        self._rest: Tensor | None = None
        self._averaged_qs: Tensor | None = None
        self._mine: tuple[Tensor, Tensor] | None = None  # the rest and Q as this rank sent them
        if self.narrow and self.owed is not None:
            add_debt(self.flat, self.owed)
            self.given, self.debt = self.flat, None
        elif self.owed is not None and self.left is not None and not self.own:
            self.given = torch.add(self.owed, self.flat, out=self.left)  # M, until the answer is taken off
            self.debt = None
        else:
            self.given, self.debt = self.flat, self.owed

    async def rows(self, qs: list[Tensor]) -> None:
        """P, averaged and orthonormal; the rest of the bucket goes with the first."""
        first = self._rest is None
        use = "factors P" if first else "factors P again"  # of another size: it has no rest
        message = self._message(use, [m.rows for m in self.cut.matrices], rest=first)
        if first:
            self.cut.gather(self.given, self.debt, message.rest)
            if self.bucket.feedback:
                self._mine = (message.rest.clone(), message.rest[:0])
        for matrix, q, p in zip(self.cut.matrices, qs, message.factors, strict=True):
            owed = matrix.of(self.debt) if first and self.debt is not None else None
            project_rows(matrix.of(self.given), owed, q, p, keep_sum=True)  # from here on M is there
        message = await self._averaged(message, [m.rows for m in self.cut.matrices])
        if first:
            self._rest = message.rest
        self.ps = message.factors
        done = orthonormalise_all(self.ps)
        self.fine = [fine and whole for fine, whole in zip(self.fine, done, strict=True)]

    async def columns(self, last: bool) -> list[Tensor]:
        """Q, averaged; in the last turn the rank's own is taken off what it owes."""
        sizes = [m.columns for m in self.cut.matrices]
        message = self._message("factors Q", sizes, rest=False)
        for place, (p, q) in enumerate(zip(self.ps, message.factors, strict=True)):
            matrix, leaves = self.cut.matrices[place], last and self.own
            owed, left = (matrix.of(d) if leaves and d is not None else None for d in (self.owed, self.left))
            m, settles = matrix.of(self.given), owed is not None and not self.narrow
            if self.fine[place]:
                before, after = (owed, left) if settles else (None, None)
                project_columns(m, before, p, q, settle=settles, left=after, summed=True)
                if self.narrow and owed is not None and left is not None:
                    leave_debt(m, p, q, owed, left)
                continue
            q.zero_()
            if left is not None and owed is not None:  # what is owed stays as it was
                left.copy_(owed)
        if last and self._mine is not None:
            self._mine = (self._mine[0], message.flat.clone())
        message = await self._averaged(message, sizes)
        self._averaged_qs = message.flat
        if not all_finite(message.flat):
            self.fine = [fine and all_finite(q) for fine, q in zip(self.fine, message.factors, strict=True)]
        return message.factors

    def answer(self, qs: list[Tensor]) -> None:
        if self.narrow and not self.own:
            self._leave_mean(qs)
        for matrix, p, q, fine in zip(self.cut.matrices, self.ps, qs, self.fine, strict=True):
            if fine:
                expand(p, q, matrix.of(self.flat))
            else:
                matrix.of(self.flat).fill_(torch.nan)
        assert self._rest is not None
        self.cut.scatter(self._rest, self.flat)
        if self.left is None:
            return
        if self.own:
            assert self.owed is not None
            self.cut.settle_rest(self._rest, self.owed, self.left)
        elif not self.narrow:
            self.left.sub_(self.flat).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _leave_mean(self, qs: list[Tensor]) -> None:
        """What the mean could not hold, while M is still in the place of the answer."""
        assert self.owed is not None
        assert self.left is not None
        assert self._rest is not None
        for matrix, p, q, fine in zip(self.cut.matrices, self.ps, qs, self.fine, strict=True):
            if fine:
                leave_debt(matrix.of(self.flat), p, q, matrix.of(self.owed), matrix.of(self.left))
            else:
                matrix.of(self.left).zero_()
        self.cut.leave_rest(self.flat, self._rest, self.left)

    def sound(self) -> bool:
        """P is orthonormal, so that what is in the answer is no larger than Q, and the rest."""
        seen = [part for part in (self._rest, self._averaged_qs) if part is not None]
        return all(self.fine) and all(map(is_small, seen))

    def sent(self) -> Callable[[], Tensor] | None:
        """What the others saw of this rank, for a wrapper that asks."""
        if not self.bucket.feedback:
            return None
        if not self.own:
            return lambda: self.flat.to(self.bucket.flat.dtype, copy=True)

        def mine() -> Tensor:
            assert self._mine is not None
            rest, q = (self.bucket.as_seen(part) for part in self._mine)
            out = torch.empty_like(self.flat)
            self.cut.scatter(rest, out)
            qs = message_in(q, self.cut, [m.columns for m in self.cut.matrices], 0).factors
            for matrix, p, own, fine in zip(self.cut.matrices, self.ps, qs, self.fine, strict=True):
                if fine:
                    expand(p, own, matrix.of(out))
                else:
                    matrix.of(out).zero_()
            return out.to(self.bucket.flat.dtype)

        return mine

    def _message(self, use: str, sizes: list[int], *, rest: bool) -> Message:
        return message_for(self.bucket, use, self.cut, sizes, rest=rest)

    async def _averaged(self, message: Message, sizes: list[int]) -> Message:
        return message_in(await all_reduce(message.flat), self.cut, sizes, message.rest.numel())
