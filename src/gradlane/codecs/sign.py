"""One bit for each element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.counter import Keys
from .blockwise import BlockCodec, Rows, check_block
from .packing import pack_bits, unpack_bits


@dataclass(frozen=True)
class Sign(BlockCodec):
    """The signs, times the mean magnitude of the block (Seide et al., 2014; Karimireddy et al., 2019).

    The mean travels as bfloat16, rounded to even, and what is owed is what the rounded one leaves. The sign
    of zero is +1. It needs error feedback. A block whose magnitudes add up to more than fp32 holds, or
    whose mean is more than bfloat16 holds, comes out as NaN.
    """

    form: ClassVar[int] = 3
    bits: ClassVar[int] = 1
    beside: ClassVar[torch.dtype] = torch.bfloat16
    block: int = 256

    def __post_init__(self) -> None:
        check_block("Sign", self.block, power_of_two="the sum in a fixed order")

    def _encode_rows(self, rows: Rows, keys: Keys) -> tuple[Tensor, Tensor]:
        sums = rows.values.abs()
        while (half := sums.shape[1] // 2) > 0:  # a fixed tree, so that every version adds alike
            sums = sums[:, :half] + sums[:, half:]
        means = sums[:, 0] / torch.full_like(sums[:, 0], rows.filled)
        scales = means.to(torch.bfloat16)
        return pack_bits(rows.values < 0), scales.masked_fill_(~scales.isfinite(), torch.nan)

    def _decode_rows(self, codes: Tensor, side: Tensor, keys: Keys) -> Tensor:
        return unpack_bits(codes).to(torch.float32).mul_(-2.0).add_(1.0).mul_(side.to(torch.float32))
