"""The C functions of low-rank compression, as methods on tensors; ``products`` checks their arguments."""

from __future__ import annotations

from torch import Tensor

from .library import Library, check_memory, pointer


class LowRankCalls(Library):
    """A part of ``Native``. csrc/kernels.h says what each function does."""

    # fmt: off
    def project_rows(
        self, g: Tensor, residual: Tensor | None, q: Tensor, p: Tensor, residual_out: Tensor | None,
        keep_sum: bool,
    ) -> None:
        self._call["project_rows"](
            *self._how(), g.data_ptr(), pointer(residual), q.data_ptr(), *g.shape, len(q),
            pointer(residual_out), keep_sum, p.data_ptr(),
        )

    def project_columns(
        self, g: Tensor, residual: Tensor | None, p: Tensor, q: Tensor, residual_out: Tensor | None,
        summed: bool,
    ) -> None:
        check_memory(self._call["project_columns"](
            *self._how(), g.data_ptr(), pointer(residual), p.data_ptr(), *g.shape, len(p),
            pointer(residual_out), summed, q.data_ptr(),
        ))

    def expand(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        self._call["expand"](
            *self._how(), p.data_ptr(), q.data_ptr(), *out.shape, len(p), out.data_ptr()
        )

    def add_residual(self, flat: Tensor, residual: Tensor) -> None:
        self._call["add_residual"](*self._how(), flat.data_ptr(), residual.data_ptr(), flat.numel())

    def subtract_product(
        self, m: Tensor, p: Tensor, q: Tensor, residual: Tensor, residual_out: Tensor
    ) -> None:
        self._call["subtract_product"](
            *self._how(), m.data_ptr(), p.data_ptr(), q.data_ptr(), *m.shape, len(p),
            residual.data_ptr(), residual_out.data_ptr(),
        )
    # fmt: on

    def orthonormalise(self, p: Tensor) -> bool:
        return bool(check_memory(self._call["orthonormalise"](self._level, p.data_ptr(), *p.shape)))
