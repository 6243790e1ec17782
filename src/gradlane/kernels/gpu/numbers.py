"""Numbers in Triton with the bits of plain torch: random ones, narrow floats, rotations.

Narrow floats are made of whole numbers: the instructions for them are not the same on all GPUs.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST, SECOND = tl.constexpr(0x21F0_AAAD), tl.constexpr(0x735A_2D97)  # as in counter.py
NO_SIGN = tl.constexpr(0x7FFF_FFFF)
INFINITE = tl.constexpr(0x7F80_0000)
QUIET_NAN = tl.constexpr(0x7FC0_0000)


@triton.jit
def draw(index, key0, key1):
    """32 random bits for each index, as ``counter.draws``."""
    bits = index.to(tl.uint32) + key0.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 15) ^ key1.to(tl.uint32)) * SECOND
    return bits ^ (bits >> 15)


@triton.jit
def float_of(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def bits_of(numbers):
    return numbers.to(tl.int32, bitcast=True)


@triton.jit
def widened(numbers):
    """fp32 of fp32, fp16 or bfloat16; exact."""
    if numbers.dtype == tl.bfloat16:
        return float_of(numbers.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return numbers.to(tl.float32)


@triton.jit
def narrowed(numbers, dtype: tl.constexpr):
    """fp32 as ``dtype``, fp32 or bfloat16, rounded to even; every NaN becomes the same."""
    if dtype == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        short = tl.where(numbers == numbers, rounded, 0x7FC0)
        return short.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return numbers


@triton.jit
def to_fp8(numbers, SHORT: tl.constexpr, BIAS: tl.constexpr):
    """Finite numbers in range as bytes with ``SHORT`` bits below the point, rounded to even."""
    all_bits = bits_of(numbers)
    bits = all_bits & NO_SIGN
    DROPPED: tl.constexpr = 23 - SHORT
    odd = (bits >> DROPPED) & 1
    normal = (bits + ((BIAS - 127) << 23) + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED
    # To add this number leaves the bits of a denormal at the end, rounded as every sum is.
    MASK: tl.constexpr = (127 - BIAS + DROPPED + 1) << 23
    mask = tl.full(bits.shape, MASK, tl.int32)
    denormal = bits_of(float_of(bits) + float_of(mask)) - mask
    tiny = bits < ((128 - BIAS) << 23)
    return tl.where(tiny, denormal, normal) | ((all_bits >> 24) & 0x80)


@triton.jit
def from_fp8(codes, SHORT: tl.constexpr, BIAS: tl.constexpr, FINITE: tl.constexpr):
    """The numbers again. ``FINITE``: the format has one NaN and no infinity, as E4M3 of torch."""
    magnitude = codes & 0x7F
    digits = magnitude & ((1 << SHORT) - 1)
    exponent = magnitude >> SHORT
    normal = float_of(((exponent + 127 - BIAS) << 23) | (digits << (23 - SHORT)))
    TINIEST: tl.constexpr = (128 - BIAS - SHORT) << 23
    denormal = digits.to(tl.float32) * float_of(tl.full(codes.shape, TINIEST, tl.int32))
    value = tl.where(exponent == 0, denormal, normal)
    if FINITE:
        value = tl.where(magnitude == 0x7F, float_of(tl.full(codes.shape, QUIET_NAN, tl.int32)), value)
    else:
        special = float_of(tl.where(digits == 0, INFINITE, QUIET_NAN))
        value = tl.where(exponent == (1 << (7 - SHORT)) - 1, special, value)
    return float_of(bits_of(value) | ((codes & 0x80) << 24))


@triton.jit
def hadamard(rows, norm, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr):
    """As ``rotation.hadamard``, widest butterflies first: each turn takes the highest bit of the index, and
    leaves it as the lowest."""
    for _ in tl.static_range(LOG):
        first, second = tl.split(tl.permute(tl.reshape(rows, [ROWS, 2, BLOCK // 2]), (0, 2, 1)))
        rows = tl.reshape(tl.join(first + second, first - second), [ROWS, BLOCK])
    return rows * norm


@triton.jit
def tree_sum(rows, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr):
    """The sum of each row, halves onto halves: two numbers are added at a time, so the order is fixed."""
    for level in tl.static_range(LOG):
        rows = tl.sum(tl.reshape(rows, [ROWS, 2, BLOCK >> (level + 1)]), axis=1)
    return tl.reshape(rows, [ROWS])
