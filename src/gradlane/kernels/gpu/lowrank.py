"""The passes of low-rank compression over a gradient matrix of ``rows`` x ``columns``.

A factor has one row for each of ``RANK`` ranks: p [RANK, rows] and q [RANK, columns].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import FLOAT_MAX
from .numbers import narrowed, widened


@triton.jit
def sum_rows(
    gradient, residual, total, q, p, rows, columns,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``total`` = gradient + residual, and p[k, i] = sum over j of total[i, j] q[k, j]: each program has
    ``ROWS`` whole rows, so the order of a sum depends on the shape alone."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, PADDED)[None, :]
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(0, columns, WIDTH):
        column = start + tl.arange(0, WIDTH)
        exists = column < columns
        at, inside = row[:, None] * columns + column[None, :], (row < rows)[:, None] & exists[None, :]
        m = tl.load(gradient + at, mask=inside, other=0.0) + tl.load(residual + at, mask=inside, other=0.0)
        tl.store(total + at, m, mask=inside)
        for k in tl.static_range(RANK):
            factor = tl.load(q + k * columns + column, mask=exists, other=0.0)
            part = tl.sum(m * factor[None, :], axis=1)
            sums = tl.where(rank == k, sums + part[:, None], sums)
    tl.store(p + rank * rows + row[:, None], sums, mask=(row < rows)[:, None] & (rank < RANK))


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The rows and columns of a program, where its elements are, and which of them exist."""
    program, across = tl.program_id(0).to(tl.int64), tl.cdiv(columns, WIDTH)
    row = program // across * ROWS + tl.arange(0, ROWS)
    column = program % across * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row, column, row[:, None] * columns + column[None, :], inside


@triton.jit
def _product(p, q, row, column, rows, columns, RANK: tl.constexpr):
    """p^T q of a tile, one rank after the other: every product and every sum is rounded."""
    for k in tl.static_range(RANK):
        left = tl.load(p + k * rows + row, mask=row < rows, other=0.0)[:, None]
        right = tl.load(q + k * columns + column, mask=column < columns, other=0.0)[None, :]
        if k == 0:
            total = left * right
        else:
            total = total + left * right
    return total


@triton.jit
def expand(p, q, out, rows, columns, RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out = p^T q."""
    row, column, at, inside = _tile(rows, columns, ROWS, WIDTH)
    tl.store(out + at, _product(p, q, row, column, rows, columns, RANK), mask=inside)


@triton.jit
def subtract(
    total, p, q, residual, residual_out, rows, columns,
    RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """residual_out = total - p^T q, rounded once to its dtype; the old residual where that is not finite."""
    row, column, at, inside = _tile(rows, columns, ROWS, WIDTH)
    sent = _product(p, q, row, column, rows, columns, RANK)
    dtype: tl.constexpr = residual_out.dtype.element_ty
    left = narrowed(tl.load(total + at, mask=inside, other=0.0) - sent, dtype)
    finite = tl.abs(widened(left)) <= FLOAT_MAX
    before = tl.load(residual + at, mask=inside & (finite == 0), other=0.0)
    tl.store(residual_out + at, tl.where(finite, left, before), mask=inside)
