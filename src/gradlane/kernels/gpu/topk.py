"""Selection of the largest magnitudes. Magnitudes are compared as the bits of their floats.

``facts`` are whole numbers that the kernels hand on: see ``triton_topk``. Counts are added by atomic
operations: sums of whole numbers do not depend on an order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import FLOAT_MAX
from .numbers import NO_SIGN, bits_of, narrowed, widened

ESTIMATE, REACHED, LARGEST, MISSED, PREFIX, THRESHOLD, BEFORE, WRAPPED, FOUND = (
    tl.constexpr(number) for number in range(9)
)


@triton.jit
def _magnitudes(numbers, at, numel):
    """Of those that exist; the others are zero."""
    return bits_of(tl.load(numbers + at, mask=at < numel, other=0.0)) & NO_SIGN


@triton.jit
def sum_and_count(
    flat, residual, total, histogram, facts, numel,
    SUM: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """``total`` = residual + flat; how many have each highest digit, or reach the estimate; the largest."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    if SUM:
        inside = at < numel
        sums = tl.load(residual + at, mask=inside, other=0.0) + tl.load(flat + at, mask=inside, other=0.0)
        tl.store(total + at, sums, mask=inside)
        found = bits_of(sums) & NO_SIGN
    else:
        found = _magnitudes(flat, at, numel)
    digits = tl.histogram(found >> SHIFT, BINS)
    tl.atomic_add(histogram + tl.arange(0, BINS), digits, mask=digits > 0)
    reached = (found >= tl.load(facts + ESTIMATE)) & (at < numel)
    tl.atomic_add(facts + REACHED, tl.sum(reached.to(tl.int32), axis=0))
    tl.atomic_max(facts + LARGEST, tl.max(found, axis=0))


@triton.jit
def count_digit(
    total, histogram, facts, numel, SHIFT: tl.constexpr, BINS: tl.constexpr, ELEMENTS: tl.constexpr
):
    """How many have each next digit, of those that begin like the threshold, if the estimate misses."""
    if tl.load(facts + MISSED) == 0:
        return
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    digits = _magnitudes(total, at, numel) >> SHIFT
    alike = (digits // BINS == tl.load(facts + PREFIX)) & (at < numel)
    # All others go to a bin of their own, one beyond.
    counts = tl.histogram(tl.where(alike, digits % BINS, BINS), 2 * BINS)
    tl.atomic_add(histogram + tl.arange(0, 2 * BINS), counts, mask=counts > 0)


@triton.jit
def count_reached(total, counts, facts, numel, start, ELEMENTS: tl.constexpr):
    """How many elements of each program reach the threshold, and how many lie before ``start``."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    reached = _magnitudes(total, at, numel) >= tl.load(facts + THRESHOLD)
    tl.store(counts + tl.program_id(0), tl.sum(reached.to(tl.int32), axis=0))
    early = tl.sum((reached & (at < start)).to(tl.int32), axis=0)
    if early > 0:
        tl.atomic_add(facts + BEFORE, early)


@triton.jit
def take(
    total, ends, values, indices, counts, facts, numel, slots,
    SUBTRACT: tl.constexpr, SPAN: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Write what is taken to its slots. With ``SUBTRACT`` leave in ``total`` what rounding loses of it, and 0
    for what is not finite.

    In the order of positions an element is number ``order``; from the start on, wrapping around, ``turn``.
    """
    program = tl.program_id(0)
    at = program.to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    numbers = tl.load(total + at, mask=at < numel, other=0.0)
    reached = (bits_of(numbers) & NO_SIGN) >= tl.load(facts + THRESHOLD)
    running = tl.cumsum(reached.to(tl.int32), axis=0)
    order = tl.load(ends + program) - tl.max(running, axis=0) + running - 1
    before = tl.load(facts + BEFORE)
    turn = tl.where(order < before, order - before + tl.load(facts + FOUND), order - before)
    taken = reached & (turn < slots)
    slot = tl.where(order < before, order, tl.load(facts + WRAPPED) + order - before)
    rounded = narrowed(numbers, values.dtype.element_ty)
    tl.store(values + slot, rounded, mask=taken)
    tl.store(indices + slot, (at & 0xFFFF).to(tl.int16), mask=taken)
    tl.atomic_add(counts + program * ELEMENTS // SPAN, tl.sum(taken.to(tl.int32), axis=0))
    if SUBTRACT:
        left = tl.where(taken, numbers - widened(rounded), numbers)
        finite = tl.abs(left) <= FLOAT_MAX
        tl.store(total + at, tl.where(finite, left, 0.0), mask=(taken | (finite == 0)) & (at < numel))
