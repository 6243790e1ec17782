"""Powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.message import PayloadLayout
from ..kernels.counter import Keys, draws
from .blockwise import BlockCodec
from .packing import pack_bits, unpack_bits
from .plain_blocks import Rows

INFINITE = 0x7F80_0000
EXPONENT = 23  # the first bit of a float's exponent


@dataclass(frozen=True)
class Natural(BlockCodec):
    """Natural compression (Horvath et al., 2019): each element is rounded up or down to a power of
    two, at random, so that its mean stays. Nine bits: a byte of exponents, and the signs.

    Random bits are added below the exponent: they carry into it with the right probability. Only
    magnitudes above 2**127, which have no power of two above them, are rounded down.
    """

    form: ClassVar[int] = 6
    bits: ClassVar[int] = 8
    has_scales: ClassVar[bool] = False
    block: ClassVar[int] = 1024  # type: ignore[misc]  # elements share nothing; the kernels need some size

    @property
    def granularity(self) -> int:
        return 8  # signs fill bytes

    def layout(self, numel: int) -> PayloadLayout:
        return (((numel,), torch.uint8), ((-(-numel // 8),), torch.uint8))

    def encode_rows(self, rows: Rows, keys: Keys) -> tuple[Tensor, Tensor]:
        magnitudes = rows.values.view(torch.int32).to(torch.int64).bitwise_and_(0x7FFF_FFFF)
        chance = draws(rows.first, magnitudes.numel(), keys, magnitudes.device).view_as(magnitudes)
        exponents = ((magnitudes + (chance >> 32 - EXPONENT)) >> EXPONENT).clamp_(max=254)
        exponents.masked_fill_(magnitudes >= INFINITE, 255)
        return exponents.to(torch.uint8), pack_bits(rows.values.signbit())

    def decode_rows(self, codes: Tensor, side: Tensor, keys: Keys) -> Tensor:
        bits = codes.to(torch.int32) << EXPONENT
        values = bits.view(torch.float32) * (1.0 - 2.0 * unpack_bits(side).to(torch.float32))
        return values.masked_fill_(codes == 255, torch.nan)
