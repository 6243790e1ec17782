"""Axes of charts: the position of a value, and the ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .number_format import MINUS, byte_size, duration

WIDE = 20  # if the ends of lines differ by more than this factor, the axis is logarithmic


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``; ``unit`` is "", "B" (bytes) or "s" (seconds)."""

    low: float
    high: float
    unit: str = ""
    logarithmic: bool = False

    def shows(self, value: float) -> bool:
        return value > 0 or not self.logarithmic

    def at(self, value: float) -> float:
        """The position of a value: 0 at the low end, 1 at the high end; others lie outside."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values within the axis, and their texts with the unit."""
        if self.logarithmic:
            return self._decades(about)
        step = round_step((self.high - self.low) / about)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        return [(value, self._text(value, step)) for value in values]

    def _decades(self, about: int) -> list[tuple[float, str]]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / about))
        return [(10.0**power, self._text(10.0**power, 0)) for power in range(first, last + 1, stride)]

    def _text(self, value: float, step: float) -> str:
        if not step:  # a decade: every tick has its own unit
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
