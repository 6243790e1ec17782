"""At which rate of the link a strategy begins to pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

from .beat import Beat
from .curves import Curves
from .forecast import DDP, forecasts, judge
from .pipeline import Forecast
from .scale import at_rate
from .work import BucketWork

SLOWEST, FASTEST = 1e6 / 8, 1e12 / 8  # bytes per second
STEPS = 12  # of the bisection: the answer is right to a third of a percent


def pays_below(at: Callable[[float], tuple[Forecast, Forecast]], error: float) -> float | None:
    """The bytes per second below which a strategy pays; None if it never does. ``at`` gives the forecast of
    the strategy and that of DDP."""

    def pays(rate: float) -> bool:
        return judge(*at(rate), error).verdict == "pays"

    if pays(FASTEST):
        return FASTEST
    low, high = SLOWEST, FASTEST
    if not pays(low):
        return None
    for _ in range(STEPS):
        middle = sqrt(low * high)
        if pays(middle):
            low = middle
        else:
            high = middle
    return low


def crossings(
    beat: Beat,
    works: Mapping[str, Sequence[BucketWork]],
    curves: Curves,
    cores: float,
    error: float,
) -> dict[str, float | None]:
    """For each strategy: the bytes per second below which it pays."""

    def of(text: str) -> float | None:
        def at(rate: float) -> tuple[Forecast, Forecast]:
            found = forecasts(beat, {text: works[text]}, at_rate(curves, rate), cores)
            return found[text], found[DDP]

        return pays_below(at, error)

    return {text: of(text) for text in works}
