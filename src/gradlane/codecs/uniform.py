"""Integers of 8, 4 or 2 bits with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import InvalidValue
from ..kernels.block_form import ROTATE, STOCHASTIC
from ..kernels.counter import Keys, uniforms
from .blockwise import BlockCodec, check_block, scaled
from .packing import pack, unpack
from .plain_blocks import Rows
from .rotation import rotated, rotated_back

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class _Uniform(BlockCodec):
    """Symmetric levels: the largest magnitude of a block maps to the highest, zero to zero.

    ``rounding="stochastic"`` is unbiased (Alistarh et al., 2017, with the maximum norm).
    ``rotate=True`` first spreads outliers over the block by random signs and a Hadamard transform (Suresh et
    al., 2017); decode then needs the seed of encode.
    """

    block: int
    rounding: Rounding = "nearest"
    rotate: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.rounding not in ROUNDINGS:
            raise InvalidValue(f"{name} rounding={self.rounding!r}; use one of {', '.join(ROUNDINGS)}")
        check_block(name, self.block, power_of_two="rotate=True" if self.rotate else "")

    @property
    def levels(self) -> int:
        return (1 << self.bits - 1) - 1

    @property
    def padded(self) -> bool:  # type: ignore[override]
        return self.rotate  # a rotation fills the padding

    @property
    def flags(self) -> int:  # type: ignore[override]
        return STOCHASTIC * (self.rounding == "stochastic") + ROTATE * self.rotate

    def encode_rows(self, rows: Rows, keys: Keys) -> tuple[Tensor, Tensor]:
        values = rotated(rows.values, keys) if self.rotate else rows.values
        codes, scale = scaled(values, self.levels)
        if self.rounding == "stochastic":
            noise = uniforms(rows.first, codes.numel(), keys, codes.device).view_as(codes)
            codes.add_(noise).floor_().clamp_(-self.levels, self.levels)
        else:
            codes.round_()
        return pack(codes.to(torch.int8), self.bits), scale

    def decode_rows(self, codes: Tensor, side: Tensor, keys: Keys) -> Tensor:
        values = unpack(codes, self.bits).to(torch.float32).mul_(side)
        return rotated_back(values, keys) if self.rotate else values


@dataclass(frozen=True)
class Int8(_Uniform):
    """-127 to 127: a byte for each element. Relative error 5.5e-5 on Gaussian data."""

    form: ClassVar[int] = 0
    bits: ClassVar[int] = 8
    block: int = 512


@dataclass(frozen=True)
class Int4(_Uniform):
    """-7 to 7: two to a byte."""

    form: ClassVar[int] = 1
    bits: ClassVar[int] = 4
    block: int = 256


@dataclass(frozen=True)
class Int2(_Uniform):
    """-1, 0, 1: four to a byte. It needs error feedback, or stochastic rounding (Wen et al., 2017)."""

    form: ClassVar[int] = 2
    bits: ClassVar[int] = 2
    block: int = 128
