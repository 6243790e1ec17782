"""What a step would take with each strategy, given what it takes with one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from .beat import Beat
from .curves import Curves
from .pipeline import step_seconds
from .scale import at_rate
from .work import BucketWork

LEAST_COMPUTE, MOST_COMPUTE = 0.5, 1.2  # of what was seen: it was seen while DDP's threads used the cores
FARTHEST = 200.0  # times the measured rate, and the same part of it
STEPS = 16  # of a bisection


class Outlook:
    """Forecasts that agree with what steps take.

    The first time, compute alone is fitted: it was timed while DDP communicated, so it seemed longer than it
    is. Later, the rate of the link is fitted: if a step takes another time now, that is the first suspect.
    """

    def __init__(
        self,
        beat: Beat,
        works: Mapping[str, Sequence[BucketWork]],
        curves: Curves,
        cores: float,
        off: str,
    ) -> None:
        """``off``: the strategy that DDP carries out by itself, without a lane."""
        self._beat, self._works, self._curves, self._cores, self._off = beat, works, curves, cores, off
        self._rate = curves.bytes_per_s
        self._fitted = False

    def __call__(self, strategy: str, seconds: float) -> dict[str, float]:
        if not self._fitted:
            self._fitted = True
            factor = _bisected(
                lambda factor: self._seconds(strategy, self._rate, factor) - seconds,
                LEAST_COMPUTE,
                MOST_COMPUTE,
            )
            self._beat = self._beat.lasting(self._beat.compute * factor)
        rate = self._rate
        if not 0.95 < self._seconds(strategy, rate) / seconds < 1.05:
            rate = _bisected(
                lambda rate: seconds - self._seconds(strategy, rate), rate / FARTHEST, rate * FARTHEST
            )
        return {text: self._seconds(text, rate) for text in self._works}

    def _seconds(self, strategy: str, rate: float, factor: float = 1.0) -> float:
        beat = self._beat if factor == 1 else self._beat.lasting(self._beat.compute * factor)
        curves = self._curves if rate == self._curves.bytes_per_s else at_rate(self._curves, rate)
        commit = strategy != self._off
        return step_seconds(beat, self._works[strategy], curves, cores=self._cores, commit=commit).seconds


def _bisected(rises: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0; the nearer end if that is outside."""
    if rises(low) >= 0:
        return low
    if rises(high) <= 0:
        return high
    for _ in range(STEPS):
        middle = sqrt(low * high)
        if rises(middle) < 0:
            low = middle
        else:
            high = middle
    return sqrt(low * high)
