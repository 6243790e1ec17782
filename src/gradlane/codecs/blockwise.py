"""What codecs that work block by block share: layout, options, and the choice of kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..core.numbers import is_bounded
from ..core.streams import has_streams
from ..errors import InvalidValue
from ..kernels.block_choice import Guarded, blocks_for, blocks_on
from ..kernels.block_form import BlockForm, Blocks
from ..kernels.counter import Keys, keys_of
from .base import Codec
from .plain_blocks import PlainBlocks, Rows

STEP, LARGEST = 32, 8192  # a block is a multiple of the first, and fits the kernels' buffers
TINIEST = 2.0**-100
"""A block whose largest magnitude is below this is sent as zeros: its inverse would overflow."""
FLOAT_MAX = torch.finfo(torch.float32).max


class BlockCodec(Codec):
    """Each block of ``block`` elements becomes codes of ``bits`` bits and one entry beside them, its scale.

    A subclass does this in torch, row by row; ``form`` and ``flags`` select the same codec in the kernels.
    """

    form: ClassVar[int]
    bits: ClassVar[int]
    beside: ClassVar[torch.dtype] = torch.float32
    """The dtype of the scales."""
    padded: bool = False
    """The last block's padding is sent too."""
    flags: int = 0
    block: int

    @property
    def granularity(self) -> int:
        return self.block

    def layout(self, numel: int) -> PayloadLayout:
        blocks = -(-numel // self.block)
        coded = blocks * self.block if self.padded else numel
        return (((-(-coded * self.bits // 8),), torch.uint8), ((blocks,), self.beside))

    def bounded(self, payload: Payload) -> bool:
        return payload[1].is_floating_point() and is_bounded(payload[1])  # no scale is NaN, or infinite

    has_scales: ClassVar[bool] = True

    @abstractmethod
    def encode_rows(self, rows: Rows, keys: Keys) -> tuple[Tensor, Tensor]:
        """Codes (uint8) and scales, row by row."""

    @abstractmethod
    def decode_rows(self, codes: Tensor, side: Tensor, keys: Keys) -> Tensor:
        """The values, row by row."""

    def takes(self, tensor: Tensor) -> bool:
        if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            return super().takes(tensor)
        return isinstance(self._blocks(tensor), Guarded)

    def prepare(self, device: torch.device) -> None:
        if has_streams(device):
            blocks_on(self.block_form, PlainBlocks(self), device)

    @property
    def block_form(self) -> BlockForm:
        return BlockForm(self.form, self.flags, self.block, self.bits)

    def _blocks(self, tensor: Tensor) -> Blocks:
        return blocks_for(self.block_form, PlainBlocks(self), tensor)

    def _encode(self, flat: Tensor, seed: int, payload: Payload) -> None:
        self._blocks(flat).encode(flat, None, None, keys_of(seed), payload)

    def _encode_with_feedback(
        self, gradient: Tensor, residual: Tensor, residual_out: Tensor, seed: int, payload: Payload
    ) -> bool:
        return self._blocks(residual).encode(gradient, residual, residual_out, keys_of(seed), payload)

    def _decode(self, payload: Payload, out: Tensor, seed: int) -> None:
        self._blocks(out).decode([payload], [keys_of(seed)], out, 1.0, False)

    def _decode_sum(
        self, payloads: Sequence[Payload], out: Tensor, seeds: Sequence[int], factor: float
    ) -> None:
        self._blocks(out).decode(payloads, [keys_of(seed) for seed in seeds], out, factor, False)

    def _add_decoded(self, payload: Payload, into: Tensor, seed: int) -> None:
        self._blocks(into).decode([payload], [keys_of(seed)], into, 1.0, True)


def check_block(codec: str, block: int, *, power_of_two: str = "") -> None:
    """Refuse a block that the kernels could not work on; ``power_of_two`` says what needs one."""
    if not isinstance(block, int) or block % STEP or not STEP <= block <= LARGEST:
        raise InvalidValue(f"{codec} block={block!r}; use a multiple of {STEP} from {STEP} to {LARGEST}")
    if power_of_two and block & (block - 1):
        raise InvalidValue(
            f"{codec} block={block}: {power_of_two} needs a power of two; use {1 << block.bit_length() - 1} "
            f"or {1 << block.bit_length()}"
        )


def _all_usable(largest: Tensor) -> bool:
    low, high = torch.aminmax(largest)
    return bool(low >= TINIEST and high <= FLOAT_MAX)


def scaled(rows: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Rows scaled so that the largest magnitude of each becomes ``top``, and the scales that undo it.

    A block with NaN or Inf becomes zeros with the scale NaN; one whose values are all tiny becomes zeros with
    the scale 0. Tensors are divided by tensors: some devices replace a division by a number by a product.
    """
    largest = rows.abs().amax(1)
    tops = torch.full_like(largest, top)
    if rows.device.type == "cpu" and _all_usable(largest):  # on a device the host would have to wait
        return rows * (tops / largest)[:, None], largest / tops
    usable = (largest >= TINIEST) & (largest <= FLOAT_MAX)
    safe = torch.where(usable, largest, 1.0)
    scale = torch.where(usable, safe / tops, torch.where(largest < TINIEST, 0.0, torch.nan))
    return (rows * (tops / safe)[:, None]).masked_fill_(~usable[:, None], 0.0), scale
