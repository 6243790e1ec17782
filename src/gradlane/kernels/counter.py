"""Random numbers as a function of (seed, index), the same in C and in torch.

A counter goes through a 32-bit integer hash (two multiplications and three shifts, constants from
Wellons' hash prospector); there is no state, so any part of a sequence can be drawn by any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFF_FFFF
# Both below 2**31: their product with 32 bits fits into torch's signed 64.
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
    """``count`` numbers of 32 random bits (as int64) for the indices from ``first`` on."""
    bits = torch.arange(first, first + count, device=device).add_(keys[0]).bitwise_and_(MASK)
    bits.bitwise_xor_(bits >> 16).mul_(FIRST).bitwise_and_(MASK)
    bits.bitwise_xor_(bits >> 15).bitwise_xor_(keys[1]).mul_(SECOND).bitwise_and_(MASK)
    return bits.bitwise_xor_(bits >> 15)


def draw(index: int, keys: Keys) -> int:
    """One of them as a plain number."""
    bits = (index + keys[0]) & MASK
    bits = ((bits ^ (bits >> 16)) * FIRST) & MASK
    bits = ((bits ^ (bits >> 15) ^ keys[1]) * SECOND) & MASK
    return bits ^ (bits >> 15)


def uniforms(first: int, count: int, keys: Keys, device: torch.device | None = None) -> Tensor:
    """Numbers in (0, 1) for stochastic rounding: the middles of 65,536 equal parts.

    With 16 bits, y + u is exact for |y| in [64, 128), so the largest code is never passed by rounding.
    """
    return (
        draws(first, count, keys, device).bitwise_right_shift_(16).to(torch.float32).add_(0.5).mul_(2.0**-16)
    )
