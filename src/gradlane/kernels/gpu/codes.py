"""Codes and values of some blocks in Triton, one per row: what each form of codec does in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import (
    INFINITE,
    NO_SIGN,
    QUIET_NAN,
    bits_of,
    draw,
    float_of,
    from_fp8,
    narrowed,
    to_fp8,
    tree_sum,
    widened,
)

SIGN, E4M3, E5M2, NATURAL = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
TINIEST = tl.constexpr(2.0**-100)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: to add it rounds to whole numbers, half to even


@triton.jit
def encoded(
    values, at, filled, key0, key1,
    FORM: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """(codes, side): side is the scale of each row, or of ``Natural`` the sign of each element."""
    if FORM == NATURAL:
        magnitudes = (bits_of(values) & NO_SIGN).to(tl.uint32)
        exponents = tl.minimum((magnitudes + (draw(at, key0, key1) >> 9)) >> 23, 254)
        codes = tl.where(magnitudes >= INFINITE, 255, exponents).to(tl.int32)
        side = (bits_of(values) >> 31) & 1
    elif FORM == SIGN:
        count = tl.maximum(filled, 1).to(tl.float32)
        means = tl.div_rn(tree_sum(tl.abs(values), ROWS, WIDTH, LOG), count)
        side = widened(narrowed(means, tl.bfloat16))
        side = tl.where(side <= FLOAT_MAX, side, float_of(tl.full([ROWS], QUIET_NAN, tl.int32)))
        codes = (values < 0).to(tl.int32)
    else:
        scaled, side = _scaled(values, TOP, ROWS)
        if FORM == E4M3:
            codes = to_fp8(scaled, 3, 7)
        elif FORM == E5M2:
            codes = to_fp8(scaled, 2, 15)
        elif STOCHASTIC:
            noise = ((draw(at, key0, key1) >> 16).to(tl.float32) + 0.5) * 0.0000152587890625  # 2**-16
            sums = scaled + noise
            near = _rounded(sums)
            below = tl.where(near > sums, near - 1.0, near)  # the instruction of ``floor`` drops denormals
            codes = tl.minimum(tl.maximum(below, -TOP), TOP).to(tl.int32)
        else:
            codes = _rounded(scaled).to(tl.int32)
    return codes, side


@triton.jit
def _rounded(numbers):
    return (numbers + TO_WHOLE) - TO_WHOLE


@triton.jit
def _scaled(values, TOP: tl.constexpr, ROWS: tl.constexpr):
    """As ``blockwise.scaled``. The bits of magnitudes are ordered as the numbers are, with NaN above all."""
    largest = float_of(tl.max(bits_of(values) & NO_SIGN, axis=1))
    usable = (largest >= TINIEST) & (largest <= FLOAT_MAX)
    safe = tl.where(usable, largest, 1.0)
    tops = tl.full([ROWS], TOP, tl.float32)
    nan = float_of(tl.full([ROWS], QUIET_NAN, tl.int32))
    scale = tl.where(usable, tl.div_rn(safe, tops), tl.where(largest < TINIEST, 0.0, nan))
    return tl.where(usable[:, None], values * tl.div_rn(tops, safe)[:, None], 0.0), scale


@triton.jit
def decoded(codes, side, FORM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The values of codes: whole numbers with their sign, bytes, or bits."""
    if FORM == NATURAL:
        value = float_of(codes << 23) * (1.0 - 2.0 * side.to(tl.float32))
        values = tl.where(codes == 255, float_of(tl.full([ROWS, WIDTH], QUIET_NAN, tl.int32)), value)
    elif FORM == SIGN:
        values = (1.0 - 2.0 * codes.to(tl.float32)) * side[:, None]
    elif FORM == E4M3:
        values = from_fp8(codes, 3, 7, True) * side[:, None]
    elif FORM == E5M2:
        values = from_fp8(codes, 2, 15, False) * side[:, None]
    else:
        values = codes.to(tl.float32) * side[:, None]
    return values


@triton.jit
def packed(codes, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes of ``8 // BITS`` codes each, element 0 in the lowest bits."""
    PER: tl.constexpr = 8 // BITS
    codes = codes & ((1 << BITS) - 1)
    if PER > 1:
        shifts = (tl.arange(0, PER) * BITS)[None, None, :]
        codes = tl.sum(tl.reshape(codes, [ROWS, WIDTH // PER, PER]) << shifts, axis=2)
    return codes.to(tl.uint8)


@triton.jit
def unpacked(bytes_, BITS: tl.constexpr, SIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The codes again; ``SIGNED``: in two's complement."""
    PER: tl.constexpr = 8 // BITS
    codes = bytes_.to(tl.int32)
    if PER > 1:
        shifts = (tl.arange(0, PER) * BITS)[None, None, :]
        codes = tl.reshape(codes[:, :, None] >> shifts, [ROWS, WIDTH]) & ((1 << BITS) - 1)
    if SIGNED:
        HALF: tl.constexpr = 1 << (BITS - 1)
        codes = (codes ^ HALF) - HALF
    return codes
