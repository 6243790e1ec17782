"""Random numbers as a function of (seed, index), the same in C and in torch.

Each number is a 32-bit integer hash of a counter (two multiplications and three shifts, with constants from
Wellons' hash prospector). There is no state, so any thread can draw any part of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFF_FFFF
# Both are below 2**31, so their product with a 32-bit number fits into torch's int64.
FIRST, SECOND = 0x21F0_AAAD, 0x735A_2D97

Keys = tuple[int, int]


def keys_of(seed: int) -> Keys:
    """Two 32-bit keys from a seed of up to 64 bits (the finaliser of splitmix64)."""
    wide = (seed + 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF
    wide = ((wide ^ (wide >> 30)) * 0xBF58_476D_1CE4_E5B9) & 0xFFFF_FFFF_FFFF_FFFF
    wide = ((wide ^ (wide >> 27)) * 0x94D0_49BB_1331_11EB) & 0xFFFF_FFFF_FFFF_FFFF
    wide ^= wide >> 31
    return wide & MASK, wide >> 32


def draws(first: int, count: int, keys: Keys, device: torch.device | None = None) -> Tensor:
    """32 random bits (as int64) for each of ``count`` indices from ``first`` on."""
    bits = torch.arange(first, first + count, device=device).add_(keys[0]).bitwise_and_(MASK)
    bits.bitwise_xor_(bits >> 16).mul_(FIRST).bitwise_and_(MASK)
    bits.bitwise_xor_(bits >> 15).bitwise_xor_(keys[1]).mul_(SECOND).bitwise_and_(MASK)
    return bits.bitwise_xor_(bits >> 15)


def draw(index: int, keys: Keys) -> int:
    """32 random bits for one index."""
    bits = (index + keys[0]) & MASK
    bits = ((bits ^ (bits >> 16)) * FIRST) & MASK
    bits = ((bits ^ (bits >> 15) ^ keys[1]) * SECOND) & MASK
    return bits ^ (bits >> 15)


def uniforms(first: int, count: int, keys: Keys, device: torch.device | None = None) -> Tensor:
    """Numbers in (0, 1) for stochastic rounding: the middles of 65,536 equal intervals.

    With 16 bits, y + u is exact for |y| in [64, 128), so rounding never exceeds the largest code.
    """
    return (
        draws(first, count, keys, device).bitwise_right_shift_(16).to(torch.float32).add_(0.5).mul_(2.0**-16)
    )
