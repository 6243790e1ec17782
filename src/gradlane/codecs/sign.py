"""One bit for each element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.block_form import ROTATE
from ..kernels.counter import Keys
from .blockwise import BlockCodec, check_block
from .packing import pack_bits, unpack_bits
from .plain_blocks import Rows
from .rotation import rotated, rotated_back


@dataclass(frozen=True)
class Sign(BlockCodec):
    """The signs, times the mean magnitude of the block (Seide et al., 2014; Karimireddy et al., 2019).

    The mean travels as bfloat16, rounded to even; the residual is computed with the rounded one. The sign of
    zero is +1. It needs error feedback. A block whose sum of magnitudes overflows fp32, or whose mean
    overflows bfloat16, decodes to NaN.

    Of a block x of n elements the share ``1 - |x|_1^2 / (n |x|_2^2)`` is lost: a third if it is Gaussian,
    nearly all if a few elements stand out, and then a residual takes many steps to arrive. ``rotate=True``
    first makes every block nearly Gaussian, by random signs and a Hadamard transform (Vargaftik et al., 2021,
    "DRIVE"); decode then needs the seed of encode.
    """

    form: ClassVar[int] = 3
    bits: ClassVar[int] = 1
    beside: ClassVar[torch.dtype] = torch.bfloat16
    block: int = 256
    rotate: bool = False

    def __post_init__(self) -> None:
        check_block("Sign", self.block, power_of_two="the sum in a fixed order")

    @property
    def padded(self) -> bool:  # type: ignore[override]
        return self.rotate  # a rotation fills the padding

    @property
    def flags(self) -> int:  # type: ignore[override]
        return ROTATE * self.rotate

    def encode_rows(self, rows: Rows, keys: Keys) -> tuple[Tensor, Tensor]:
        values = rotated(rows.values, keys) if self.rotate else rows.values
        sums = values.abs()
        while (half := sums.shape[1] // 2) > 0:  # a fixed tree: every implementation adds in this order
            sums = sums[:, :half] + sums[:, half:]
        means = sums[:, 0] / torch.full_like(sums[:, 0], self.block if self.rotate else rows.filled)
        scales = means.to(torch.bfloat16)
        return pack_bits(values < 0), scales.masked_fill_(~scales.isfinite(), torch.nan)

    def decode_rows(self, codes: Tensor, side: Tensor, keys: Keys) -> Tensor:
        values = unpack_bits(codes).to(torch.float32).mul_(-2.0).add_(1.0).mul_(side.to(torch.float32))
        return rotated_back(values, keys) if self.rotate else values
