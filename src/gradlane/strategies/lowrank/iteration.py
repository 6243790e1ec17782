"""One bucket on its way through PowerSGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ...core.bucket import Bucket
from ...core.collectives import all_reduce
from ...core.numbers import is_small
from ...kernels.bf16_residual import add_debt, leave_debt
from ...kernels.finite import all_finite
from ...kernels.products import expand, orthonormalise_all, project_columns, project_rows
from .factors import Message, message_for, message_in, widened
from .matrices import Cut

Owes = Literal["own", "mean"]


class Step:
    """What ``PowerSGD.reduce`` does, pass by pass."""

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
