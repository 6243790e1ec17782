"""What codecs that work block by block share: pieces, padding, kernels, feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..core.numbers import is_bounded
from ..errors import InvalidValue
from ..kernels.counter import Keys, keys_of
from ..kernels.native import native_for
from .base import PIECE, Codec

STEP, LARGEST = 32, 8192  # a block is a multiple of the first, and fits the kernels' buffers
TINIEST = 2.0**-100
"""A block whose largest magnitude is below this is sent as zeros: its inverse would overflow."""
FLOAT_MAX = torch.finfo(torch.float32).max


class Rows(NamedTuple):
    """Some blocks, one per row; the last of all may be padded with zeros."""

    values: Tensor
    first: int
    """Index of the first element in the flat gradient."""
    filled: int
    """Elements of each row that are not padding."""


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

    @abstractmethod
    def _encode_rows(self, rows: Rows, keys: Keys) -> tuple[Tensor, Tensor]:
        """Codes (uint8) and scales, row by row."""

    @abstractmethod
    def _decode_rows(self, codes: Tensor, side: Tensor, keys: Keys) -> Tensor:
        """The values, row by row."""

    def _encode(self, flat: Tensor, seed: int, payload: Payload) -> None:
        keys = keys_of(seed)
        if library := native_for(flat):
            library.encode_blocks(self.form, self.flags, flat, None, None, self.block, keys, *payload)
            return
        for start, stop, rows in self._pieces(flat.numel(), flat.device):
            self._encode_piece(flat[start:stop], start, rows, keys, payload)

    def _encode_with_feedback(
        self, gradient: Tensor, residual: Tensor, residual_out: Tensor, seed: int, payload: Payload
    ) -> None:
        keys = keys_of(seed)
        if library := native_for(residual):
            library.encode_blocks(
                self.form, self.flags, gradient, residual, residual_out, self.block, keys, *payload
            )
            return
        for start, stop, rows in self._pieces(residual.numel(), residual.device):
            piece = residual[start:stop]
            sums = piece + gradient[start:stop]
            self._encode_piece(sums, start, rows, keys, payload)
            lost = sums.sub_(self._decode_piece(payload, start, stop, rows, keys))
            residual_out[start:stop] = torch.where(lost.isnan(), piece, lost)

    def _decode(self, payload: Payload, out: Tensor, seed: int) -> None:
        keys = keys_of(seed)
        if library := native_for(out):
            library.decode_blocks(
                self.form, self.flags, payload[0], payload[1], self.block, keys, out, add=False
            )
            return
        for start, stop, rows in self._pieces(out.numel(), out.device):
            out[start:stop] = self._decode_piece(payload, start, stop, rows, keys)

    def _decode_sum(
        self, payloads: Sequence[Payload], out: Tensor, seeds: Sequence[int], factor: float
    ) -> None:
        keys = [keys_of(seed) for seed in seeds]
        if library := native_for(out):
            library.decode_many(self.form, self.flags, payloads, self.block, keys, out, factor)
            return
        for start, stop, rows in self._pieces(out.numel(), out.device):
            total = out[start:stop]
            for number, (payload, own) in enumerate(zip(payloads, keys, strict=True)):
                values = self._decode_piece(payload, start, stop, rows, own, factor)
                total.add_(values) if number else total.copy_(values)

    def _add_decoded(self, payload: Payload, into: Tensor, seed: int) -> None:
        keys = keys_of(seed)
        if library := native_for(into):
            library.decode_blocks(
                self.form, self.flags, payload[0], payload[1], self.block, keys, into, add=True
            )
            return
        for start, stop, rows in self._pieces(into.numel(), into.device):
            into[start:stop].add_(self._decode_piece(payload, start, stop, rows, keys))

    def _pieces(self, numel: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
        """(start, stop, rows): full blocks in pieces that fit the cache, then the last, if not full."""
        full = numel // self.block * self.block  # elements in full blocks
        size = max(1, PIECE // self.block) * self.block if device.type == "cpu" else max(1, full)
        for start in range(0, full, size):
            stop = min(start + size, full)
            yield start, stop, (stop - start) // self.block
        if full < numel:
            yield full, numel, 1

    def _encode_piece(self, piece: Tensor, start: int, rows: int, keys: Keys, payload: Payload) -> None:
        count = piece.numel() // rows
        values = piece if count == self.block else pad(piece, (0, self.block - count))
        found = self._encode_rows(Rows(values.view(rows, self.block), start, count), keys)
        for part, total in zip(found, payload, strict=True):
            target = total[start // self.block * part[0].numel() :][: part.numel()]
            target.copy_(part.reshape(-1)[: target.numel()])

    def _decode_piece(
        self, payload: Payload, start: int, stop: int, rows: int, keys: Keys, factor: float = 1.0
    ) -> Tensor:
        parts = []
        for total, width in zip(payload, self._widths(), strict=True):
            part = total[start // self.block * width :][: rows * width]
            missing = rows * width - part.numel()
            parts.append((pad(part, (0, missing)) if missing else part).view(rows, width))
        side = parts[1] if factor == 1.0 else parts[1].to(torch.float32) * factor  # the scales
        return self._decode_rows(parts[0], side, keys).view(-1)[: stop - start]

    def _widths(self) -> tuple[int, int]:
        """Entries of each part of the payload for one full block."""
        codes, side = self.layout(self.block)
        return codes[0][0], side[0][0]


def check_block(codec: str, block: int, *, power_of_two: str = "") -> None:
    """Refuse a block that the kernels could not work on; ``power_of_two`` says what needs one."""
    if not isinstance(block, int) or block % STEP or not STEP <= block <= LARGEST:
        raise InvalidValue(f"{codec} block={block!r}; use a multiple of {STEP} from {STEP} to {LARGEST}")
    if power_of_two and block & (block - 1):
        raise InvalidValue(
            f"{codec} block={block}: {power_of_two} needs a power of two; use {1 << block.bit_length() - 1} "
            f"or {1 << block.bit_length()}"
        )


def scaled(rows: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Rows scaled so that the largest magnitude of each becomes ``top``, and the scales that undo it.

    A block with NaN or Inf becomes zeros with the scale NaN; one whose values are all tiny becomes zeros with
    the scale 0. Tensors are divided by tensors: some devices replace a division by a number by a product.
    """
    largest = rows.abs().amax(1)
    tops = torch.full_like(largest, top)
    low, high = torch.aminmax(largest)
    if low >= TINIEST and high <= FLOAT_MAX:
        return rows * (tops / largest)[:, None], largest / tops
    usable = (largest >= TINIEST) & (largest <= FLOAT_MAX)
    safe = torch.where(usable, largest, 1.0)
    scale = torch.where(usable, safe / tops, torch.where(largest < TINIEST, 0.0, torch.nan))
    return (rows * (tops / safe)[:, None]).masked_fill_(~usable[:, None], 0.0), scale
