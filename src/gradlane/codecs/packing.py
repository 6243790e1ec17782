"""Codes of less than a byte, packed and unpacked by whole words: element 0 in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack(codes: Tensor, bits: int) -> Tensor:
    """Rows of int8 codes as rows of bytes, ``8 // bits`` to a byte, in two's complement."""
    if bits == 8:
        return codes.view(torch.uint8)
    if bits == 4:
        pairs = codes.view(torch.int16)
        return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)
    fours = codes.view(torch.int32)
    packed = (fours & 0x03) | ((fours >> 6) & 0x0C)
    packed |= ((fours >> 12) & 0x30) | ((fours >> 18) & 0xC0)
    return packed.to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The int8 codes again."""
    if bits == 8:
        return packed.view(torch.int8)
    if bits == 4:
        pairs = packed.to(torch.int16)
        codes = ((pairs & 0x0F) | ((pairs & 0xF0) << 4)).view(torch.int8)
        return codes.bitwise_xor_(8).sub_(8)
    fours = packed.to(torch.int32)
    spread = (fours & 0x03) | ((fours & 0x0C) << 6) | ((fours & 0x30) << 12) | ((fours & 0xC0) << 18)
    return spread.view(torch.int8).bitwise_xor_(2).sub_(2)


def pack_bits(marks: Tensor) -> Tensor:
    """Rows of booleans as rows of bytes."""
    eights = marks.view(torch.int64)
    eights = eights | (eights >> 7)
    eights |= eights >> 14
    eights |= eights >> 28
    return (eights & 0xFF).to(torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """The marks again, as bytes of 0 and 1."""
    eights = packed.to(torch.int64)
    eights = (eights | (eights << 28)) & 0x0000_000F_0000_000F
    eights = (eights | (eights << 14)) & 0x0003_0003_0003_0003
    eights = (eights | (eights << 7)) & 0x0101_0101_0101_0101
    return eights.view(torch.uint8)


def pack_places(places: Tensor) -> Tensor:
    """Numbers of 12 bits, two in three bytes; the last one of an odd count has two bytes."""
    count = places.numel()
    pairs = pad(places, (0, count % 2)).view(-1, 2)
    both = pairs[:, 0] | pairs[:, 1] << 12
    return (
        torch.stack([both & 0xFF, both >> 8 & 0xFF, both >> 16], 1)
        .view(-1)
        .to(torch.uint8)[: -(-3 * count // 2)]
    )


def unpack_places(packed: Tensor, count: int) -> Tensor:
    """The numbers again, as int64."""
    threes = pad(packed, (0, count % 2)).view(-1, 3).to(torch.int64)
    both = threes[:, 0] | threes[:, 1] << 8 | threes[:, 2] << 16
    return torch.stack([both & 0xFFF, both >> 12], 1).view(-1)[:count]
