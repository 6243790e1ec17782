"""What a block codec is to the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from .counter import Keys

STOCHASTIC, ROTATE = 1, 2  # flags
NATURAL = 6  # the form without scales


class BlockForm(NamedTuple):
    """One number for each codec, as in csrc/blocks.h, its options, and its sizes."""

    form: int
    flags: int
    block: int
    bits: int


class Blocks(Protocol):
    """The work of a block codec: in C, in Triton or in plain torch, with the same bits."""

    def encode(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, keys: Keys, payload: Payload
    ) -> bool:
        """The payload of flat, or of flat + residual; then ``residual_out`` takes what it loses. The answer:
        whether ``residual_out`` is known to be finite."""

    def decode(
        self, payloads: Sequence[Payload], keys: Sequence[Keys], out: Tensor, factor: float, add: bool
    ) -> None:
        """``out`` becomes the sum of the payloads, in their order, times ``factor``, or one payload is added
        to it. Where there are scales they are multiplied, not the sum."""


class PlainBlocks(Blocks, Protocol):
    """In plain torch; the others are compared with it."""

    @property
    def name(self) -> str:
        """Of the codec, with its options."""

    def layout(self, numel: int) -> PayloadLayout: ...
