"""The largest elements of each chunk: places of 12 bits, values of two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..core.numbers import is_bounded, is_number
from ..core.streams import has_streams
from ..errors import InvalidValue
from .base import PIECE, keep_finite
from .packing import pack, pack_places, unpack, unpack_places
from .scattered import ScatteredCodec
from .selection import CHUNK, largest_of_rows

VALUES = {"int2": torch.uint8, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ChunkTopK(ScatteredCodec):
    """The ``ratio`` largest magnitudes of each chunk of 4096 elements, as in SparseLoCo (Sarfi et al., 2025).

    A chunk of m elements sends exactly ceil(ratio * m) of them, of equal magnitudes the first; the last chunk
    may be shorter. Every chunk has its share, so no layer starves beside one with larger gradients, and a
    place needs 12 bits. It needs error feedback.

    With ``value="int2"`` a value is a sign and one of two levels. The levels are those with the smallest
    squared error for the values that the chunk sends: these are sorted by magnitude, and of all cuts into a
    high and a low part the best is taken; a level is the mean magnitude of its part, as bfloat16. On Gaussian
    data that loses half a hundredth of what 32 bits would send.

    Payload: values, places in the order of the elements, two of them in three bytes, and with ``"int2"`` the
    high and the low level of each chunk. A value that is non-finite, or becomes so in bfloat16, is sent as
    NaN; with ``"int2"`` all values of its chunk are.
    """

    ratio: float = 0.02
    value: Literal["int2", "float32", "bfloat16"] = "int2"

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise InvalidValue(
                f"ChunkTopK ratio={self.ratio!r}; use a share above 0 and up to 1, such as 0.02"
            )
        if self.value not in VALUES:
            raise InvalidValue(f"ChunkTopK value={self.value!r}; use one of {', '.join(VALUES)}")

    def slots(self, numel: int) -> int:
        """How many elements are sent."""
        full, rest = divmod(numel, CHUNK)
        return full * self._share(CHUNK) + self._share(rest)

    def _share(self, numel: int) -> int:
        return math.ceil(self.ratio * numel)

    def layout(self, numel: int) -> PayloadLayout:
        slots = self.slots(numel)
        places = ((-(-3 * slots // 2),), torch.uint8)
        if self.value != "int2":
            return (((slots,), VALUES[self.value]), places)
        return (((-(-slots // 4),), torch.uint8), places, ((-(-numel // CHUNK), 2), torch.bfloat16))

    def bounded(self, payload: Payload) -> bool:
        return is_bounded(payload[2] if self.value == "int2" else payload[0])

    def _encode(self, flat: Tensor, seed: int, payload: Payload) -> None:
        positions = self._positions(flat)
        taken = flat[positions]
        payload[1].copy_(pack_places(positions % CHUNK))
        if self.value == "int2":
            self._quantise(taken, payload)
        else:
            payload[0].copy_(taken)
            payload[0].masked_fill_(~payload[0].isfinite(), torch.nan)

    def _quantise(self, taken: Tensor, payload: Payload) -> None:
        """Bit 0 of a code is the level, bit 1 the sign."""
        codes, _, levels = payload
        share = self._share(CHUNK)
        full = taken.numel() // share  # the last chunk may be full, and then there is no shorter one
        high = []
        for rows, own in (
            (taken[: full * share].view(full, share), levels[:full]),
            (taken[None, full * share :], levels[full:]),
        ):
            if rows.numel():
                are_high, means = two_levels(rows.abs())
                own.copy_(means)
                high.append(are_high.view(-1))
        found = torch.cat(high).to(torch.int8)
        found -= 2 * (taken < 0).to(torch.int8)
        codes.copy_(pack(pad(found, (0, -found.numel() % 4)), 2))

    def _positions(self, flat: Tensor) -> Tensor:
        """Where the largest magnitudes of each chunk are, in ascending order."""
        full = flat.numel() // CHUNK * CHUNK
        size = 4 * PIECE if flat.device.type == "cpu" else max(1, full)  # large: each has twenty calls
        found = [
            start + largest_of_rows(flat[start : min(start + size, full)].view(-1, CHUNK), self._share(CHUNK))
            for start in range(0, full, size)
        ]
        if full < flat.numel():
            found.append(full + largest_of_rows(flat[None, full:], self._share(flat.numel() - full)))
        return torch.cat([positions.view(-1) for positions in found])

    def _decoded(self, payload: Payload, numel: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Positions and values of a payload of ``numel`` elements."""
        slots = self.slots(numel)
        chunks = torch.arange(slots, device=payload[1].device) // self._share(CHUNK)
        positions = chunks * CHUNK + unpack_places(payload[1], slots)
        if self.value != "int2":
            return positions, payload[0].to(torch.float32) * factor
        codes, levels = unpack(payload[0], 2)[:slots], payload[2].to(torch.float32) * factor
        magnitudes = torch.where((codes & 1) > 0, levels[chunks, 0], levels[chunks, 1])
        return positions, torch.where(codes < 0, -magnitudes, magnitudes)

    def _scatter(self, payload: Payload, into: Tensor, factor: float) -> None:
        positions, values = self._decoded(payload, into.numel(), factor)
        into[positions] += values

    def _encode_with_feedback(
        self, gradient: Tensor, residual: Tensor, residual_out: Tensor, seed: int, payload: Payload
    ) -> bool:
        total = torch.add(residual, gradient, out=residual_out)
        self._encode(total, seed, payload)
        positions, sent = self._decoded(payload, total.numel())
        taken, unsent = total[positions], sent.isnan()  # nobody can use NaN, so these stay
        total[positions] = torch.where(unsent, taken, taken - sent)
        if has_streams(total.device) or unsent.any():
            keep_finite(total)
            return True
        return False


def two_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the two levels with the smallest squared error: which elements have the high one, and both
    levels, bfloat16 [rows, 2], the high one first; a level of no elements is 0. Both are NaN if one would be
    non-finite.

    Of n elements with the sum s, the mean keeps s^2 / n of the squared norm. Both levels together are best
    where they keep the most, and the best cut is between neighbours in the order of magnitudes.
    """
    count = magnitudes.shape[1]
    descending = magnitudes.to(torch.float64).sort(dim=1, descending=True).values
    sums = descending.cumsum(1)
    first = torch.arange(1, count + 1, dtype=torch.float64, device=magnitudes.device)
    rest = sums[:, -1:] - sums
    kept = sums.square() / first + rest.square() / (count - first).clamp_(min=1)
    cut = kept.argmax(1, keepdim=True)
    high = magnitudes >= descending.gather(1, cut)  # equal ones are on the same side
    size = high.sum(1, keepdim=True)
    above = sums.gather(1, (size - 1).clamp_(min=0))
    below = (sums[:, -1:] - above) / (count - size).clamp_(min=1)
    levels = torch.cat([above / size.clamp(min=1), below], 1).to(torch.float32).to(torch.bfloat16)
    unusable = ~levels.isfinite().all(1, keepdim=True)
    return high & ~unusable, levels.masked_fill_(unusable, torch.nan)
