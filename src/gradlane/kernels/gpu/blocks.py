"""The two kernels of block codecs: encode with the residual, and decode the sum of any number of payloads.

Each program works on ``ROWS`` blocks; of ``WIDTH`` columns, a power of two, a block fills the first
``BLOCK``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import FLOAT_MAX, NATURAL, SIGN, decoded, encoded, packed, unpacked
from .numbers import draw, float_of, hadamard, narrowed, widened

MINUS_ZERO = tl.constexpr(-0x8000_0000)  # its bits: to add a number to it changes no bit of that


@triton.jit
def _signs(key0, key1, WIDTH: tl.constexpr):
    return 1.0 - 2.0 * (draw(tl.arange(0, WIDTH), key1, key0) >> 31).to(tl.float32)[None, :]


@triton.jit
def _places(row, numel, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Where the bytes of codes of ``BITS`` bits are, and which of them exist."""
    PER: tl.constexpr = 8 // BITS
    column = tl.arange(0, WIDTH // PER)[None, :]
    place = row[:, None] * (BLOCK // PER) + column
    if PADDED:
        exists = (row * BLOCK < numel)[:, None]
    else:
        exists = place * PER < numel
    if WIDTH != BLOCK:
        exists = exists & (column * PER < BLOCK)
    return place, exists


@triton.jit(do_not_specialize=["key0", "key1", "norm"])
def encode(
    gradient, residual, residual_out, codes, sides, numel, key0, key1, norm,
    FORM: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr, ROTATE: tl.constexpr,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, inside = _places(row, numel, 8, BLOCK, WIDTH, False)
    values = widened(tl.load(gradient + at, mask=inside, other=0.0))
    if FEEDBACK:
        kept = widened(tl.load(residual + at, mask=inside, other=0.0))
        values = kept + values
    if ROTATE:
        signs, filled = _signs(key0, key1, WIDTH), tl.full([ROWS], BLOCK, tl.int64)
        rows = hadamard(values * signs, norm, ROWS, WIDTH, LOG)
    else:
        filled = tl.minimum(numel - row * BLOCK, BLOCK)
        rows = values
    code, side = encoded(rows, at, filled, key0, key1, FORM, TOP, STOCHASTIC, ROWS, WIDTH, LOG)
    if FEEDBACK:
        sent = decoded(code, side, FORM, ROWS, WIDTH)
        if ROTATE:
            sent = hadamard(sent, norm, ROWS, WIDTH, LOG) * signs
        lost = values - sent
        lost = tl.where(lost == lost, lost, kept)
        rounded = widened(narrowed(lost, residual_out.dtype.element_ty))
        finite = tl.where(tl.abs(rounded) <= FLOAT_MAX, rounded, 0.0)
        tl.store(residual_out + at, narrowed(finite, residual_out.dtype.element_ty), mask=inside)
    if FORM == NATURAL:
        place, exists = _places(row, numel, 1, BLOCK, WIDTH, False)
        tl.store(sides + place, packed(side, 1, ROWS, WIDTH), mask=exists)
    else:
        tl.store(sides + row, narrowed(side, sides.dtype.element_ty), mask=row * BLOCK < numel)
    place, exists = _places(row, numel, BITS, BLOCK, WIDTH, ROTATE)
    tl.store(codes + place, packed(code, BITS, ROWS, WIDTH), mask=exists)


@triton.jit(do_not_specialize=["count", "hole", "key0", "key1", "factor", "norm"])
def decode(
    codes, sides, out, keys, numel, count, hole, code_stride, side_stride, key0, key1, factor, norm,
    FORM: tl.constexpr, BITS: tl.constexpr, ROTATE: tl.constexpr, TABLE: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Payloads are one stride behind the other, and two behind the one with the number ``hole``. ``TABLE``:
    the keys of each are in ``keys``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, inside = _places(row, numel, 8, BLOCK, WIDTH, False)
    place, exists = _places(row, numel, BITS, BLOCK, WIDTH, ROTATE)
    if FORM == NATURAL:
        side_place, side_exists = _places(row, numel, 1, BLOCK, WIDTH, False)
    if ADD:
        total = widened(tl.load(out + at, mask=inside, other=0.0))
    else:
        total = float_of(tl.full([ROWS, WIDTH], MINUS_ZERO, tl.int32))
    for number in range(count):
        code = unpacked(tl.load(codes + place, mask=exists, other=0), BITS, FORM < SIGN, ROWS, WIDTH)
        if FORM == NATURAL:
            marks = tl.load(sides + side_place, mask=side_exists, other=0)
            values = decoded(code, unpacked(marks, 1, False, ROWS, WIDTH), FORM, ROWS, WIDTH)
        else:
            side = widened(tl.load(sides + row, mask=row * BLOCK < numel, other=0.0)) * factor
            values = decoded(code, side, FORM, ROWS, WIDTH)
        if ROTATE:
            if TABLE:
                signs = _signs(tl.load(keys), tl.load(keys + 1), WIDTH)
            else:
                signs = _signs(key0, key1, WIDTH)
            values = hadamard(values, norm, ROWS, WIDTH, LOG) * signs
        total = total + values
        codes += tl.where(number == hole, 2 * code_stride, code_stride)
        sides += tl.where(number == hole, 2 * side_stride, side_stride)
        keys += 2
    if FORM == NATURAL:
        total = total * factor
    tl.store(out + at, narrowed(total, out.dtype.element_ty), mask=inside)
