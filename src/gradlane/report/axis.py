"""Axes of charts: the position of a value, and the ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .number_format import MINUS, bit_rate, byte_size, duration

WIDE = 5  # if the ends of lines differ by more than this factor, the axis is logarithmic
FLOOR = 0.002  # of the range, below the lowest loss: where the axis of losses would end
BESIDE = 0.15  # of an axis, between ticks such as "100 ms" and "200 ms"
APART = 0.09  # of an axis, between two of its ticks


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``; ``unit`` is "", "B" (bytes), "s" (seconds) or "bit" (per second).

    A logarithmic axis counts from ``origin``, which it never reaches.
    """

    low: float
    high: float
    unit: str = ""
    logarithmic: bool = False
    origin: float = 0.0

    def shows(self, value: float) -> bool:
        return value > self.origin or not self.logarithmic

    def at(self, value: float) -> float:
        """The position of a value: 0 at the low end, 1 at the high end; others lie outside."""
        if self.logarithmic:
            low, high = self.low - self.origin, self.high - self.origin
            return math.log((value - self.origin) / low) / math.log(high / low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values within the axis, and their texts with the unit."""
        if self.logarithmic and not self.unit:
            return self._stretched()
        if self.logarithmic:
            return self._decades(about)
        step = round_step((self.high - self.low) / about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        return [(value, self._text(value, step)) for value in values]

    def _decades(self, about: int) -> list[tuple[float, str]]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first < 2:
            return [(value, self._text(value, 0)) for value in self._within_decades(first, last)]
        stride = max(1, math.ceil((last - first + 1) / about))
        return [(10.0**power, self._text(10.0**power, 0)) for power in range(first, last + 1, stride)]

    def _within_decades(self, first: int, last: int) -> list[float]:
        """1, 2 and 5 times powers of ten, but for those too close to the one before."""
        kept: list[float] = []
        for value in (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)):
            near = kept and self.at(value) < self.at(kept[-1]) + BESIDE
            if self.low <= value <= self.high and not near:
                kept.append(value)
        return kept

    def _stretched(self) -> list[tuple[float, str]]:
        """Round values that are not too close to one another; finer ones only below the coarser."""
        found: list[tuple[float, str]] = []
        step = round_step((self.high - self.low) / 5)
        while step > (self.low - self.origin) / 2:
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            for value in (number * step for number in range(last, first - 1, -1)):
                if not found or self.at(value) < self.at(found[-1][0]) - APART:
                    found.append((value, self._text(value, step)))
            step = round_step(step / 2.6)
        return found[::-1]

    def _text(self, value: float, step: float) -> str:
        if not step:  # a decade: every tick has its own unit
            if self.unit == "bit":
                return bit_rate(value)
            return byte_size(value, 1) if self.unit == "B" else duration(value, 1)
        name, factor = _unit(self.unit, self.high)
        decimals = max(0, -math.floor(math.log10(step / factor) + 1e-9))
        number = f"{value / factor:.{decimals}f}".replace("-", MINUS)
        return f"{number}\u00a0{name}" if name and value else number


def linear(values: Sequence[float], unit: str = "", from_zero: bool = False) -> Axis:
    """An axis that holds all values, with a small margin; its length is never 0."""
    low = min((0.0, *values)) if from_zero else min(values, default=0.0)
    high = max(values, default=low)
    if high <= low:
        high = low + (abs(low) or 1.0)
    margin = 0.0 if from_zero else 0.04 * (high - low)
    return Axis(low - margin, high + margin, unit)


def towards_lowest(values: Sequence[float]) -> Axis:
    """An axis for losses, stretched towards the lowest one: there the arms differ."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high <= low:
        return linear(values)
    floor = low - FLOOR * (high - low)
    return Axis(low - FLOOR / 4 * (high - low), high, logarithmic=True, origin=floor)


def spending(ends: Sequence[float], starts: Sequence[float], unit: str) -> Axis:
    """An axis for bytes or seconds spent: logarithmic if the ends of the arms are far apart.

    ``starts`` are the first positive values of the arms.
    """
    positive = [end for end in ends if end > 0]
    if unit and positive and max(positive) > WIDE * min(positive):
        return Axis(min(start for start in (*starts, *positive) if start > 0), max(positive), unit, True)
    return linear(ends, unit, from_zero=True)


def round_step(rough: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * 0.999), 10 * power)


def _unit(unit: str, high: float) -> tuple[str, float]:
    """The unit of ticks up to ``high``: its name and its size."""
    sizes = {
        "": (("", 1.0),),
        "B": (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)),
        "s": (("s", 1.0), ("ms", 1e-3), ("\u00b5s", 1e-6)),
    }[unit]
    return next((pair for pair in sizes if high >= 2 * pair[1]), sizes[-1])
