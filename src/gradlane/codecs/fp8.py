"""Eight-bit floating point with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import InvalidValue
from ..kernels.counter import Keys
from .blockwise import BlockCodec, check_block, scaled
from .plain_blocks import Rows

FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0, 4), "e5m2": (torch.float8_e5m2, 57344.0, 5)}


@dataclass(frozen=True)
class Fp8(BlockCodec):
    """E4M3 or E5M2 (Micikevicius et al., 2022), the largest magnitude of a block at the largest number.

    The bytes are those of torch's own casts, as uint8: backends refuse the float8 dtypes.
    """

    bits: ClassVar[int] = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidValue(f"Fp8 format={self.format!r}; use one of {', '.join(FORMATS)}")
        check_block("Fp8", self.block)

    @property
    def form(self) -> int:  # type: ignore[override]
        return FORMATS[self.format][2]

    def encode_rows(self, rows: Rows, keys: Keys) -> tuple[Tensor, Tensor]:
        dtype, top, _ = FORMATS[self.format]
        codes, scale = scaled(rows.values, top)
        return codes.to(dtype).view(torch.uint8), scale

    def decode_rows(self, codes: Tensor, side: Tensor, keys: Keys) -> Tensor:
        dtype, _, _ = FORMATS[self.format]
        return codes.view(dtype).to(torch.float32).mul_(side)
