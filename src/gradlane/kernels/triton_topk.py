"""Top-k in Triton: three passes over a gradient, five where the estimate of the threshold misses.

The exact threshold is found digit by digit, from histograms. The host waits for nothing: numbers that later
kernels need stay in ``facts`` on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import triton_launch, triton_state

NAME = "top-k"
SPAN = 65_536  # elements that a position of 16 bits can address
ELEMENTS = 4096  # of a program; a span is a whole number of programs
DIGITS = ((20, 2048), (10, 1024), (0, 1024))  # of a magnitude of 31 bits: how far right, and how many values
MOST = 2**31 - 2 * SPAN  # positions are counted in 32 bits
FACTS = 9
ESTIMATE, REACHED, LARGEST, MISSED, PREFIX, THRESHOLD, BEFORE, WRAPPED, FOUND = range(FACTS)
INFINITE = 0x7F80_0000
NO_SIGN = 0x7FFF_FFFF
VALUES = (torch.float32, torch.bfloat16)


class TopKPasses:
    """One selection: from flat + residual, which ``total`` becomes, or from flat, which is ``total`` then.

    ``summed``: ``total`` is the sum by now, also if a later kernel does not compile.
    """

    def __init__(self, flat: Tensor, residual: Tensor | None, total: Tensor, slots: int) -> None:
        self.flat, self.residual, self.total, self.slots = flat, residual, total, slots
        self.summed = False
        self.kernels = triton_state.kernels().topk
        self.programs = -(-flat.numel() // ELEMENTS)
        self.facts = torch.zeros(FACTS, dtype=torch.int32, device=flat.device)

    def run(
        self, sample: tuple[int, int, int] | None, start: int, subtract: bool,
        values: Tensor, indices: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        facts, slots = self.facts, self.slots
        if sample is not None:
            facts[ESTIMATE] = self._estimate(*sample)
        (shift, bins), *digits = DIGITS
        histogram = self._sum_and_count(shift, bins)
        self.summed = True
        found, estimate = facts[REACHED], facts[ESTIMATE]
        misses = (found > 2 * slots) | ((2 * found < slots) & (estimate > 1))
        facts[MISSED] = misses if sample is not None else 1
        rank = torch.full((), slots, dtype=torch.int32, device=facts.device)
        facts[PREFIX], rank = _digit_of(histogram, rank)
        for shift, bins in digits:
            digit, rank = _digit_of(self._count_digit(shift, bins)[:bins], rank)
            facts[PREFIX] = facts[PREFIX] * bins + digit
        facts[THRESHOLD] = torch.where(facts[MISSED] > 0, facts[PREFIX].clamp(min=1), estimate)
        ends = self._count_reached(start).cumsum(0, dtype=torch.int32)
        more = ends[-1] > slots
        facts[FOUND] = ends[-1]
        facts[BEFORE] = torch.where(more, facts[BEFORE], 0)
        facts[WRAPPED] = torch.where(more, (facts[BEFORE] + slots - ends[-1]).clamp(min=0), 0)
        for part in (values, indices, counts):
            part.zero_()
        self._take(ends, subtract, values, indices, counts)
        values[:1].masked_fill_(facts[LARGEST] >= INFINITE, torch.nan)

    def _estimate(self, offset: int, stride: int, rank: int) -> Tensor:
        numbers = self.flat[offset::stride]
        if self.residual is not None:
            numbers = numbers + self.residual[offset::stride]
        magnitudes = numbers.contiguous().view(torch.int32) & NO_SIGN
        return magnitudes.topk(rank, sorted=False).values.amin().clamp(min=1)

    def _sum_and_count(self, shift: int, bins: int) -> Tensor:
        histogram = torch.zeros(bins, dtype=torch.int32, device=self.facts.device)
        both = self.residual is not None
        residual = self.flat if self.residual is None else self.residual
        triton_launch.launch(
            self.kernels.sum_and_count, self.programs,
            self.flat, residual, self.total, histogram, self.facts, self.flat.numel(),
            SUM=both, SHIFT=shift, BINS=bins, ELEMENTS=ELEMENTS,
            reads=(self.flat, residual, self.facts) if both else (self.flat, self.facts),
            writes=(*((self.total,) if both else ()), histogram, self.facts),
        )  # fmt: skip
        return histogram

    def _count_digit(self, shift: int, bins: int) -> Tensor:
        histogram = torch.zeros(2 * bins, dtype=torch.int32, device=self.facts.device)
        triton_launch.launch(
            self.kernels.count_digit, self.programs,
            self.total, histogram, self.facts, self.total.numel(), SHIFT=shift, BINS=bins, ELEMENTS=ELEMENTS,
            reads=(self.facts,), writes=(histogram,), rarely=(self.total,),
        )  # fmt: skip
        return histogram

    def _count_reached(self, start: int) -> Tensor:
        counts = torch.empty(self.programs, dtype=torch.int32, device=self.facts.device)
        triton_launch.launch(
            self.kernels.count_reached, self.programs,
            self.total, counts, self.facts, self.total.numel(), start, ELEMENTS=ELEMENTS,
            reads=(self.total, self.facts), writes=(counts, self.facts),
        )  # fmt: skip
        return counts

    def _take(self, ends: Tensor, subtract: bool, values: Tensor, indices: Tensor, counts: Tensor) -> None:
        triton_launch.launch(
            self.kernels.take, self.programs,
            self.total, ends, values, indices, counts, self.facts, self.total.numel(), self.slots,
            SUBTRACT=subtract, SPAN=SPAN, ELEMENTS=ELEMENTS,
            reads=(self.total, ends, self.facts), writes=(values, indices, counts),
            rarely=(self.total,) if subtract else (),
        )  # fmt: skip


def _digit_of(histogram: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """The digit of the rank-th largest (from 1), and its rank among those with the same digit."""
    at_least = histogram.flip(0).cumsum(0, dtype=torch.int32).flip(0)
    digit = (at_least >= rank).sum(dtype=torch.int32) - 1
    here = digit.clamp(min=0).to(torch.int64).view(1)  # an index without dimensions would be asked for
    return digit, rank - (at_least - histogram).gather(0, here)[0]


def usable(flat: Tensor, values: Tensor, check: Callable[[], bool]) -> bool:
    """Whether the kernels may select from this tensor."""
    fits = type(flat) is Tensor and flat.dtype == torch.float32 and flat.is_contiguous()
    if not fits or values.dtype not in VALUES or not 0 < flat.numel() < MOST:
        return False
    return triton_state.trusts(NAME, flat.device, check)
