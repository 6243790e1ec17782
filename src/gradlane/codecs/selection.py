"""Selection in plain torch: by a threshold, with the methods of the compiled kernels, or row by row."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

SPAN = 65_536
"""Elements that a 16-bit position can address."""
CHUNK = 4096
"""Elements that a place of 12 bits can address."""
GROUP = 8
"""Elements of which the largest is looked at first, in ``largest_of_rows``."""
NO_SIGN = 0x7FFF_FFFF
INFINITE = 0x7F80_0000


class Search(Protocol):
    """Magnitudes are compared as the bits of their floats: these order NaN above Inf above all else."""

    def topk_sampled(self, flat: Tensor, residual: Tensor | None, offset: int, stride: int, rank: int) -> int:
        """The bits of the rank-th largest magnitude (from 1) in a strided sample of flat + residual."""

    def topk_exact(self, flat: Tensor, residual: Tensor | None, rank: int) -> int:
        """The bits of the rank-th largest magnitude of flat + residual."""

    def topk_select(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, threshold: int, start: int,
        values: Tensor, indices: Tensor, counts: Tensor,
    ) -> int:  # fmt: skip
        """Take what reaches the threshold; return how much there was, taken or not.

        With ``residual``, it selects from flat + residual, and ``residual_out`` gets what is not taken.
        Without, ``residual_out`` is None, or flat itself, from which the taken values are subtracted.
        """


class PlainSearch:
    def topk_sampled(self, flat: Tensor, residual: Tensor | None, offset: int, stride: int, rank: int) -> int:
        sample = flat[offset::stride]
        return _ranked(sample if residual is None else sample + residual[offset::stride], rank)

    def topk_exact(self, flat: Tensor, residual: Tensor | None, rank: int) -> int:
        return _ranked(flat if residual is None else flat + residual, rank)

    def topk_select(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, threshold: int, start: int,
        values: Tensor, indices: Tensor, counts: Tensor,
    ) -> int:  # fmt: skip
        total = flat if residual is None else torch.add(residual, flat, out=residual_out)
        magnitudes = total.view(torch.int32) & NO_SIGN
        positions = (magnitudes >= threshold).nonzero().view(-1)
        found, slots = positions.numel(), values.numel()
        nonfinite = bool((magnitudes[positions] >= INFINITE).any())
        if found > slots:  # keep the first ones from ``start`` on, wrapping around at the end
            before = int(torch.searchsorted(positions, start))
            positions = positions.roll(-before)[:slots].sort().values
        taken = total[positions]
        rounded = taken.to(values.dtype)
        if nonfinite and rounded.dtype != taken.dtype:
            rounded[taken.isnan()] = torch.nan  # a vectorised cast writes other NaN bits than a scalar one
        kept = positions.numel()
        values.zero_()[:kept] = rounded
        indices.zero_()[:kept] = (positions & 0xFFFF).to(torch.int16)
        counts.copy_(torch.bincount(positions >> 16, minlength=counts.numel()))
        if residual_out is not None:
            residual_out[positions] = taken - rounded.to(torch.float32)
        if nonfinite:
            values[0] = torch.nan
        return found


def scatter_selected(values: Tensor, indices: Tensor, counts: Tensor, into: Tensor, factor: float) -> None:
    """``into += values * factor`` at the positions of the values."""
    spans = torch.arange(0, counts.numel() * SPAN, SPAN, device=into.device)
    bases = torch.repeat_interleave(spans, counts.to(torch.int64))
    positions = bases + (indices[: bases.numel()].to(torch.int64) & 0xFFFF)
    into[positions] += values[: bases.numel()].to(torch.float32) * factor


def _ranked(numbers: Tensor, rank: int) -> int:
    """At least 1, so that zeros do not count."""
    magnitudes = numbers.contiguous().view(torch.int32) & NO_SIGN
    return max(1, int(torch.kthvalue(magnitudes, magnitudes.numel() - rank + 1).values))


def largest_of_rows(rows: Tensor, count: int) -> Tensor:
    """Positions of the largest magnitudes of each row, from the first element of the first row on.

    Magnitudes are compared as the bits of their floats, which order NaN above Inf above all else. Where few
    are wanted it is twice as fast to look at the largest of each group first: ``count`` elements lie in
    ``count`` groups at most, and those are the first by their largest.
    """
    number, size = rows.shape
    magnitudes = rows.view(torch.int32) & NO_SIGN
    places = torch.arange(size, device=rows.device).expand(number, size)
    if size % GROUP == 0 and 2 * GROUP * count <= size:
        groups = _first(magnitudes.view(number, -1, GROUP).amax(2), places[:, : size // GROUP], count)
        places = (groups[:, :, None] * GROUP + places[0, :GROUP]).view(number, -1)
        magnitudes = magnitudes.gather(1, places)
    found = _first(magnitudes, places, count).sort(dim=1).values
    return found + torch.arange(0, rows.numel(), size, device=rows.device)[:, None]


def _first(magnitudes: Tensor, places: Tensor, count: int) -> Tensor:
    """The places of the largest in each row, in any order. With the place in the lowest bits no two numbers
    are equal, so every implementation takes the same ones."""
    keys = magnitudes.to(torch.int64) << 12 | CHUNK - 1 - places
    return CHUNK - 1 - keys.topk(count, dim=1, sorted=False).values % CHUNK
