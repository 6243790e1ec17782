"""One bucket on its way through PowerSGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ...core.bucket import Bucket
from ...core.collectives import all_reduce
from ...core.numbers import is_small
from ...kernels.bf16_residual import add_residual, subtract_product
from ...kernels.finite import all_finite
from ...kernels.products import expand, orthonormalise_all, project_columns, project_rows
from .factors import Message, message_for, message_in, widened
from .matrices import Cut

Owes = Literal["own", "mean"]


class Step:
    """What ``PowerSGD.reduce`` does, pass by pass."""

    def __init__(self, bucket: Bucket, cut: Cut, owes: Owes) -> None:
        self.bucket, self.cut = bucket, cut
        self.flat, self.residual, self.residual_out = widened(bucket), bucket.residual, bucket.residual_after
        self.own = owes == "own"
        self.narrow = self.residual is not None and self.residual.dtype != self.flat.dtype
        """The debt is of another width: it is added at once, and left by ``subtract_product``."""
        self.ps: list[Tensor] = []
        self.fine = [True] * len(cut.matrices)
        """Per matrix: all numbers so far are finite. They come from the wire, so all ranks see the same."""
        self._rest: Tensor | None = None
        self._averaged_qs: Tensor | None = None
        self._mine: tuple[Tensor, Tensor] | None = None  # the rest and Q as this rank sent them
        if self.narrow and self.residual is not None:
            add_residual(self.flat, self.residual)
            self.given, self.to_add = self.flat, None
        elif self.residual is not None and self.residual_out is not None and not self.own:
            self.given = torch.add(
                self.residual, self.flat, out=self.residual_out
            )  # M, until the answer is taken off
            self.to_add = None
        else:
            self.given, self.to_add = self.flat, self.residual

    async def rows(self, qs: list[Tensor]) -> None:
        """P, averaged and orthonormal; the rest of the bucket goes with the first."""
        first = self._rest is None
        use = "factors P" if first else "factors P again"  # of another size: it has no rest
        message = self._message(use, [m.rows for m in self.cut.matrices], rest=first)
        if first:
            self.cut.gather(self.given, self.to_add, message.rest)
            if self.bucket.feedback:
                self._mine = (message.rest.clone(), message.rest[:0])
        for matrix, q, p in zip(self.cut.matrices, qs, message.factors, strict=True):
            residual = matrix.of(self.to_add) if first and self.to_add is not None else None
            project_rows(matrix.of(self.given), residual, q, p, keep_sum=True)  # from here on M is there
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
            residual, residual_out = (
                matrix.of(d) if leaves and d is not None else None for d in (self.residual, self.residual_out)
            )
            m, subtract = matrix.of(self.given), residual is not None and not self.narrow
            if self.fine[place]:
                before, after = (residual, residual_out) if subtract else (None, None)
                project_columns(m, before, p, q, subtract=subtract, residual_out=after, summed=True)
                if self.narrow and residual is not None and residual_out is not None:
                    subtract_product(m, p, q, residual, residual_out)
                continue
            q.zero_()
            if residual_out is not None and residual is not None:  # the residual stays as it was
                residual_out.copy_(residual)
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
        if self.residual_out is None:
            return
        if self.own:
            assert self.residual is not None
            self.cut.settle_rest(self._rest, self.residual, self.residual_out)
        elif not self.narrow:
            self.residual_out.sub_(self.flat).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _leave_mean(self, qs: list[Tensor]) -> None:
        """What the mean could not hold, while M is still in the place of the answer."""
        assert self.residual is not None
        assert self.residual_out is not None
        assert self._rest is not None
        for matrix, p, q, fine in zip(self.cut.matrices, self.ps, qs, self.fine, strict=True):
            if fine:
                subtract_product(
                    matrix.of(self.flat), p, q, matrix.of(self.residual), matrix.of(self.residual_out)
                )
            else:
                matrix.of(self.residual_out).zero_()
        self.cut.leave_rest(self.flat, self._rest, self.residual_out)

    def bounded(self) -> bool:
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
