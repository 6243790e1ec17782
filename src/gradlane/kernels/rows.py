"""Functions of the rows of all ranks, [ranks, n]: means of the middle values, and inner products.

Compiled kernels on the CPU, plain torch elsewhere. Means have the same bits either way. Inner products may
differ in the last bits of fp64, so all ranks sum them up before any rank decides by them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core.streams import has_streams
from ..errors import InvalidValue
from .native import Native, native_for

MAX_ROWS = 64  # of the compiled kernels; csrc/rows.h has the same number
BLOCK = 16_384  # columns; in fp64 they stay in the cache


def mean_of_sorted(rows: Tensor, low: int, high: int, out: Tensor) -> None:
    """Of each column, the mean of its ``low``-th to (``high`` - 1)-th smallest values, counted from 0.

    The values must be finite; ``out`` is like a row, and contiguous.
    """
    _check(rows, out)
    native = _native(rows)
    if native is not None:
        native.middle(rows.contiguous(), network(len(rows)), out, low, high)
        return
    if has_streams(rows.device):  # the host does not ask whether a sum overflows
        block = rows.sort(0).values[low:high]
        mean = _sum(block).div_(high - low)
        wide = _sum(block.double()).div_(high - low).to(mean.dtype)
        out.copy_(torch.where(mean.isfinite(), mean, wide))
        return
    for start in range(0, len(out), BLOCK):
        block = rows[:, start : start + BLOCK].sort(0).values
        mean = _sum(block[low:high]).div_(high - low)
        if (huge := ~mean.isfinite()).any():  # the sum overflows, but not the mean
            mean[huge] = _sum(block[low:high, huge].double()).div_(high - low).to(mean.dtype)
        out[start : start + BLOCK] = mean


def mean_near_middle(rows: Tensor, keep: int, out: Tensor) -> None:
    """Of each column, the mean of the ``keep`` values nearest to its median; of two equally near the smaller.

    In a sorted column they are neighbours: the run of ``keep`` moves up while the value above it is nearer
    than its lowest. The values must be finite; ``out`` is like a row, and contiguous.
    """
    _check(rows, out)
    native = _native(rows)
    if native is not None:
        native.middle(rows.contiguous(), network(len(rows)), out, keep=keep)
        return
    size = len(out) if has_streams(rows.device) else BLOCK
    for start in range(0, len(out), size):
        block = rows[:, start : start + size].sort(0).values
        mean = _mean_near_middle(block, keep)
        middle, spread = _sum_in_middle(block), block[-1] - block[0]
        huge = ~(mean.isfinite() & middle.isfinite() & spread.isfinite())
        if has_streams(rows.device):  # the host does not ask whether there are any
            mean = torch.where(huge, _mean_near_middle(block.double(), keep).to(mean.dtype), mean)
        elif huge.any():
            mean[huge] = _mean_near_middle(block[:, huge].double(), keep).to(mean.dtype)
        out[start : start + size] = mean


def _mean_near_middle(block: Tensor, keep: int) -> Tensor:
    middle, total = _sum_in_middle(block) / 2, _sum(block[:keep])
    for low in range(len(block) - keep):
        nearer = block[low + keep] - middle < middle - block[low]
        total = torch.where(nearer, _sum(block[low + 1 : low + 1 + keep]), total)
    return total.div_(keep)


def _sum_in_middle(block: Tensor) -> Tensor:
    return block[(len(block) - 1) // 2] + block[len(block) // 2]


def _check(rows: Tensor, out: Tensor) -> None:
    """The compiled kernels write through a bare pointer."""
    if out.shape != rows.shape[1:] or out.dtype != rows.dtype or not out.is_contiguous():
        raise InvalidValue(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}; for rows of {rows.dtype} "
            f"{list(rows.shape)} it must be contiguous {rows.dtype} [{rows.shape[1]}]"
        )


def _sum(rows: Tensor) -> Tensor:
    """Row after row, as the compiled kernel adds."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total


def inner_products(rows: Tensor) -> Tensor:
    """rows rows^T, fp64 [ranks, ranks], summed in fp64, in which products of fp32 are exact."""
    ranks, count = rows.shape
    gram = torch.zeros(ranks, ranks, dtype=torch.float64, device=rows.device)
    native = _native(rows)
    if native is not None:
        native.gram(rows.contiguous(), gram)
        return gram
    for start in range(0, count, BLOCK):
        wide = rows[:, start : start + BLOCK].double()
        for row, sums in zip(wide, gram, strict=True):
            sums += (wide * row).sum(1)  # sum() adds in pairs; a matrix product loses two more digits
    return gram


@lru_cache(maxsize=64)
def network(ranks: int) -> bytes:
    """Pairs of rows to compare, one after the other, to sort any column: Batcher's odd-even merge sort.

    Batcher, 1968, "Sorting networks and their applications". The network is defined for a power of two;
    missing rows count as infinite, so their comparisons are left out.
    """
    pairs: list[int] = []
    size = 1
    while size < ranks:
        step = size
        while step:
            for first in range(step % size, ranks - step, 2 * step):
                for low in range(first, min(first + step, ranks - step)):
                    if low // (2 * size) == (low + step) // (2 * size):
                        pairs += (low, low + step)
            step //= 2
        size *= 2
    return bytes(pairs)


def _native(rows: Tensor) -> Native | None:
    return native_for(rows) if rows.dtype == torch.float32 and 0 < len(rows) <= MAX_ROWS else None
