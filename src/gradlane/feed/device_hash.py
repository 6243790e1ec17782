"""A hash of a tensor's bits, computed where the tensor is: one number comes to the host in place of all."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 22  # elements: the numbers in between take eight bytes each
FIRST, SECOND = 0x1E37_79B9_7F4A_7C15, 0x3F58_476D_1CE4_E5B9  # odd, with bits of all kinds
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def device_hash(tensor: Tensor) -> Tensor:
    """The sum of all elements' bits, each mixed with its index by a mapping that is one to one, modulo 2^64.

    Whole numbers have the same sum in every order. A tensor that differs in one element always has another
    hash; one that differs in several has the same with a chance of about 2^-60.
    """
    bits = tensor.detach().contiguous().view(-1).view(WHOLE[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK]
        numbers = _mixed(torch.arange(start, start + len(chunk), device=bits.device), 32)
        total += _mixed(numbers.add_(chunk), 29).sum()
    return total


def _mixed(numbers: Tensor, shift: int) -> Tensor:
    numbers.mul_(FIRST)
    numbers.bitwise_xor_(numbers >> shift).mul_(SECOND)
    return numbers.bitwise_xor_(numbers >> 32)
