"""One bucket on its way through PowerSGD."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.bucket import Bucket, Feedback
from ...core.collectives import all_reduce
from ...core.numbers import is_bounded
from ...core.streams import has_streams
from ...kernels.bf16_residual import add_residual, subtract_product
from ...kernels.finite import all_finite
from ...kernels.products import expand, orthonormalise_all, project_columns, project_rows
from .factors import Message, message_in, new_message, widened
from .partition import Partition


class PowerIteration:
    """The passes of ``PowerSGD.reduce`` over a bucket: ``rows``, ``columns``, ``answer``.

    M is the gradient plus the residual. The first ``rows`` writes M in place of the gradient, and the last
    ``columns`` writes the new residual, M - P Q^T with the rank's own Q. Both happen in the pass that
    computes the product: the kernels add and subtract while they read.
    """

    def __init__(self, bucket: Bucket, parts: Partition) -> None:
        feedback = bucket.feedback or Feedback()
        self.bucket, self.parts, self.flat = bucket, parts, widened(bucket)
        self.residual, self.residual_out = feedback.residual, feedback.residual_out
        self.to_add = self.residual  # what the first projection adds
        self.narrow = self.residual is not None and self.residual.dtype != self.flat.dtype
        """The residual is in bfloat16: it is added at once, and ``subtract_product`` writes the new one."""
        if self.narrow and self.residual is not None:
            add_residual(self.flat, self.residual)
            self.to_add = None
        self.finite = [True] * len(parts.matrices)
        """Per matrix: all averages so far are finite. They come from the wire, so all ranks see the same."""
        self.ps: list[Tensor] = []
        self.dense: Tensor = self.flat[:0]  # the averaged dense part
        self._averaged_qs: Tensor = self.flat[:0]
        self._own_dense: Tensor = self.flat[:0]  # dense part and Q as this rank sent them, where wanted
        self._own_qs: Tensor = self.flat[:0]

    async def rows(self, qs: list[Tensor], *, first: bool) -> None:
        """P = M Q, averaged and made orthonormal; the dense part travels with the first."""
        use = "factors P" if first else "factors P again"  # the second has another size: no dense part
        sizes = [m.rows for m in self.parts.matrices]
        message = new_message(self.bucket, use, self.parts, sizes, with_dense=first)
        if first:
            self.parts.gather_dense(self.flat, self.to_add, message.dense)
            if self.bucket.wants_sent:
                self._own_dense = message.dense.clone()
        for matrix, q, p in zip(self.parts.matrices, qs, message.factors, strict=True):
            residual = matrix.of(self.to_add) if first and self.to_add is not None else None
            project_rows(matrix.of(self.flat), residual, q, p, keep_sum=True)  # flat holds M from here on
        message = await self._averaged(message, sizes)
        if first:
            self.dense = message.dense
        self.ps = message.factors
        usable = orthonormalise_all(self.ps)
        self.finite = [before and now for before, now in zip(self.finite, usable, strict=True)]

    async def columns(self, *, last: bool) -> list[Tensor]:
        """Q = M^T P, averaged. The last one writes the new residual, M - P Q^T with the rank's own Q."""
        sizes = [m.columns for m in self.parts.matrices]
        message = new_message(self.bucket, "factors Q", self.parts, sizes, with_dense=False)
        for index, (p, q) in enumerate(zip(self.ps, message.factors, strict=True)):
            self._project_columns(index, p, q, subtract=last)
        if last and self.bucket.wants_sent:
            self._own_qs = message.flat.clone()
        message = await self._averaged(message, sizes)
        self._averaged_qs = message.flat
        # On a device the host does not ask: what is not finite is in the product, and no factor is kept.
        if not has_streams(message.flat.device) and not all_finite(message.flat):
            self.finite = [
                before and all_finite(q) for before, q in zip(self.finite, message.factors, strict=True)
            ]
        return message.factors

    def _project_columns(self, index: int, p: Tensor, q: Tensor, *, subtract: bool) -> None:
        matrix = self.parts.matrices[index]
        m = matrix.of(self.flat)
        before: Tensor | None = None
        after: Tensor | None = None
        if subtract and self.residual is not None and self.residual_out is not None:
            before, after = matrix.of(self.residual), matrix.of(self.residual_out)
        if not self.finite[index]:  # nothing is delivered: the residual stays as it was
            q.zero_()
            if before is not None and after is not None:
                after.copy_(before)
        elif before is None or after is None:
            project_columns(m, None, p, q, summed=True)
        elif self.narrow:
            project_columns(m, None, p, q, summed=True)
            subtract_product(m, p, q, before, after)
        else:
            project_columns(m, before, p, q, subtract=True, residual_out=after, summed=True)

    def answer(self, qs: list[Tensor]) -> None:
        """Write P Q^T and the dense mean in place of the gradient; NaN where a matrix was not finite."""
        for matrix, p, q, finite in zip(self.parts.matrices, self.ps, qs, self.finite, strict=True):
            if finite:
                expand(p, q, matrix.of(self.flat))
            else:
                matrix.of(self.flat).fill_(torch.nan)
        self.parts.scatter_dense(self.dense, self.flat)
        if self.residual is not None and self.residual_out is not None:
            self.parts.clear_dense_residual(self.dense, self.residual, self.residual_out)

    def bounded(self) -> bool:
        """P is orthonormal, so no element of P Q^T is larger than the norm of Q allows."""
        return all(self.finite) and is_bounded(self.dense) and is_bounded(self._averaged_qs)

    def sent(self) -> Callable[[], Tensor] | None:
        """What the others saw of this rank: P times its own Q, and its dense part."""
        if not self.bucket.wants_sent:
            return None

        def own() -> Tensor:
            dense, q = (self.bucket.as_seen(part) for part in (self._own_dense, self._own_qs))
            out = torch.empty_like(self.flat)
            self.parts.scatter_dense(dense, out)
            qs = message_in(q, self.parts, [m.columns for m in self.parts.matrices], 0).factors
            for matrix, p, own_q, finite in zip(self.parts.matrices, self.ps, qs, self.finite, strict=True):
                if finite:
                    expand(p, own_q, matrix.of(out))
                else:
                    matrix.of(out).zero_()
            return out.to(self.bucket.flat.dtype)

        return own

    async def _averaged(self, message: Message, sizes: list[int]) -> Message:
        return message_in(await all_reduce(message.flat), self.parts, sizes, message.dense.numel())
