"""Block codecs in plain torch: what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..kernels.counter import Keys
from .base import PIECE

if TYPE_CHECKING:
    from .blockwise import BlockCodec


class Rows(NamedTuple):
    """Some blocks, one per row; the last of all may be padded with zeros."""

    values: Tensor
    first: int
    """Index of the first element in the flat gradient."""
    filled: int
    """Elements of each row that are not padding."""


@dataclass(frozen=True)
class PlainBlocks:
    """Piece by piece on the CPU; on a device all full blocks at once, then the last, if not full."""

    codec: BlockCodec

    @property
    def name(self) -> str:
        return _name(self.codec)

    def layout(self, numel: int) -> PayloadLayout:
        return self.codec.layout(numel)

    def encode(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, keys: Keys, payload: Payload
    ) -> bool:
        for start, stop, rows in self._pieces(flat.numel(), flat.device):
            piece = flat[start:stop]
            if residual is None or residual_out is None:
                self._encode_piece(piece, start, rows, keys, payload)
                continue
            kept = residual[start:stop]
            sums = kept + piece
            self._encode_piece(sums, start, rows, keys, payload)
            lost = sums.sub_(self._decode_piece(payload, start, stop, rows, keys))
            residual_out[start:stop] = torch.where(lost.isnan(), kept, lost)
        return False

    def decode(
        self, payloads: Sequence[Payload], keys: Sequence[Keys], out: Tensor, factor: float, add: bool
    ) -> None:
        by_scales, at_end = (factor, 1.0) if self.codec.has_scales else (1.0, factor)
        for start, stop, rows in self._pieces(out.numel(), out.device):
            total = out[start:stop]
            for number, (payload, own) in enumerate(zip(payloads, keys, strict=True)):
                values = self._decode_piece(payload, start, stop, rows, own, by_scales)
                total.add_(values) if number or add else total.copy_(values)
        if at_end != 1.0:
            out.mul_(at_end)

    def _pieces(self, numel: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
        """(start, stop, rows): full blocks in pieces that fit the cache, then the last, if not full."""
        block = self.codec.block
        full = numel // block * block  # elements in full blocks
        size = max(1, PIECE // block) * block if device.type == "cpu" else max(1, full)
        for start in range(0, full, size):
            stop = min(start + size, full)
            yield start, stop, (stop - start) // block
        if full < numel:
            yield full, numel, 1

    def _encode_piece(self, piece: Tensor, start: int, rows: int, keys: Keys, payload: Payload) -> None:
        block = self.codec.block
        count = piece.numel() // rows
        values = piece if count == block else pad(piece, (0, block - count))
        found = self.codec.encode_rows(Rows(values.view(rows, block), start, count), keys)
        for part, total in zip(found, payload, strict=True):
            target = total[start // block * part[0].numel() :][: part.numel()]
            target.copy_(part.reshape(-1)[: target.numel()])

    def _decode_piece(
        self, payload: Payload, start: int, stop: int, rows: int, keys: Keys, factor: float = 1.0
    ) -> Tensor:
        parts = []
        for total, width in zip(payload, self._widths(), strict=True):
            part = total[start // self.codec.block * width :][: rows * width]
            missing = rows * width - part.numel()
            parts.append((pad(part, (0, missing)) if missing else part).view(rows, width))
        side = parts[1] if factor == 1.0 else parts[1].to(torch.float32) * factor  # the scales
        return self.codec.decode_rows(parts[0], side, keys).view(-1)[: stop - start]

    def _widths(self) -> tuple[int, int]:
        """Entries of each part of the payload for one full block."""
        codes, side = self.layout(self.codec.block)
        return codes[0][0], side[0][0]


@lru_cache(maxsize=64)
def _name(codec: BlockCodec) -> str:
    return str(codec)
