"""The C functions for low-rank compression, as methods on tensors; ``products`` checks what they get."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from typing import Any

from torch import Tensor

_PROJECT = (c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_void_p)
LOW_RANK: dict[str, tuple[tuple[type, ...], type | None]] = {
    "project_rows": (_PROJECT, None),
    "project_columns": (_PROJECT, c_int),
    "expand": ((c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p), None),
    "add_residual": ((c_int, c_int, c_void_p, c_void_p, c_int64), None),
    "subtract_product": (
        (c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p),
        None,
    ),
    "orthonormalise": ((c_int, c_void_p, c_int64, c_int64), c_int),
}


class LowRankCalls:
    """A part of ``Native``."""

    _level: int
    _call: dict[str, Callable[..., Any]]

    def _how(self) -> tuple[int, int]:
        raise AssertionError("Native says how")

    def project_rows(
        self,
        g: Tensor,
        residual: Tensor | None,
        q: Tensor,
        p: Tensor,
        residual_out: Tensor | None,
        summed: bool,
    ) -> None:
        given = (*_given(g, residual, q), _pointer(residual_out), summed)
        self._call["project_rows"](*self._how(), *given, p.data_ptr())

    def project_columns(
        self,
        g: Tensor,
        residual: Tensor | None,
        p: Tensor,
        q: Tensor,
        residual_out: Tensor | None,
        summed: bool,
    ) -> None:
        given = (*_given(g, residual, p), _pointer(residual_out), summed)
        _enough(self._call["project_columns"](*self._how(), *given, q.data_ptr()))

    def expand(self, p: Tensor, q: Tensor, out: Tensor) -> None:
        self._call["expand"](*self._how(), p.data_ptr(), q.data_ptr(), *out.shape, len(p), out.data_ptr())

    def add_residual(self, flat: Tensor, residual: Tensor) -> None:
        self._call["add_residual"](*self._how(), flat.data_ptr(), residual.data_ptr(), flat.numel())

    def subtract_product(
        self, m: Tensor, p: Tensor, q: Tensor, residual: Tensor, residual_out: Tensor
    ) -> None:
        factors = p.data_ptr(), q.data_ptr()
        residuals = residual.data_ptr(), residual_out.data_ptr()
        self._call["subtract_product"](*self._how(), m.data_ptr(), *factors, *m.shape, len(p), *residuals)

    def orthonormalise(self, p: Tensor) -> bool:
        return bool(_enough(self._call["orthonormalise"](self._level, p.data_ptr(), *p.shape)))


def _given(g: Tensor, residual: Tensor | None, factor: Tensor) -> tuple[int | None, ...]:
    return g.data_ptr(), _pointer(residual), factor.data_ptr(), *g.shape, len(factor)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _enough(found: int) -> int:
    if found < 0:
        raise MemoryError("no memory for a low-rank product")
    return found
