"""Kernels that look at each element once."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import FLOAT_MAX
from .numbers import narrowed, widened


@triton.jit
def drop_huge(residual, square, numel, limit, ELEMENTS: tl.constexpr):
    """Elements of a magnitude above ``limit`` become 0. If ``square`` is finite no memory is moved."""
    if tl.abs(tl.load(square)) <= FLOAT_MAX:
        return
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    values = widened(tl.load(residual + at, mask=at < numel, other=0.0))
    kept = narrowed(tl.where(tl.abs(values) > limit, 0.0, values), residual.dtype.element_ty)
    tl.store(residual + at, kept, mask=at < numel)


@triton.jit
def count_overflow(wide, narrow, count, numel, ELEMENTS: tl.constexpr):
    """Add to ``count`` how many finite numbers have become infinite: ``wide`` is read only where some may."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    infinite = tl.abs(widened(tl.load(narrow + at, mask=at < numel, other=0.0))) > FLOAT_MAX
    before = widened(tl.load(wide + at, mask=infinite, other=0.0))
    lost = infinite & (tl.abs(before) <= FLOAT_MAX)
    tl.atomic_add(count, tl.sum(lost.to(tl.int32), axis=0))
