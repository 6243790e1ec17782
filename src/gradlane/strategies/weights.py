"""What each rank counts for: its weight, and its share of the sum of weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..core.bucket import Bucket
from ..errors import InvalidValue, WrongType
from .tokens import TokenCount

Weight = float | Callable[[], float] | Callable[[Bucket], float] | TokenCount
LEAST, LARGEST = 1e-12, 1e12  # a gradient times a weight must stay in the range of fp32


class RankWeight(NamedTuple):
    """This rank's weight in a step, and the factor that makes its gradient ``weight`` times its mean."""

    weight: float
    factor: float


class StepWeight:
    """Reads the weight once per step, so that all buckets of a step agree. It keeps nothing beyond a step."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._latest: tuple[int, RankWeight] | None = None  # of which step, and the weight
        self._takes_bucket = callable(weight) and _takes_one_argument(weight)
        self._fixed = None if callable(weight) or isinstance(weight, TokenCount) else _checked(weight)

    def of(self, bucket: Bucket) -> RankWeight:
        if bucket.joined:
            return RankWeight(0.0, 0.0)
        if self._fixed is not None:
            return RankWeight(self._fixed, self._fixed)
        if bucket.flat.device.type == "meta":
            return RankWeight(1.0, 1.0)  # a dry run must not call: there may be no weight yet
        if self._latest is None or self._latest[0] != bucket.step or bucket.index == 0:
            self._latest = (bucket.step, self._read(bucket))
        return self._latest[1]

    def _read(self, bucket: Bucket) -> RankWeight:
        if isinstance(self._weight, TokenCount):
            count, unit = self._weight.take()
            return RankWeight(_checked(count), unit)
        assert callable(self._weight)
        answer = self._weight(bucket) if self._takes_bucket else self._weight()  # type: ignore[call-arg]
        weight = _checked(answer)
        return RankWeight(weight, weight)


def _checked(weight: object) -> float:
    try:
        if isinstance(weight, bool | str):  # float() would read them
            raise TypeError
        value = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WrongType(
            f"weight is a {type(weight).__name__}; give a number, or a function that returns one"
        ) from None
    if not (math.isfinite(value) and value >= 0):
        raise InvalidValue(f"weight={value:g} is not possible; it must be finite and at least 0")
    if value and not LEAST <= value <= LARGEST:
        raise InvalidValue(
            f"weight={value:g} is out of range; use 0, or from {LEAST:g} to {LARGEST:g}: only ratios count"
        )
    return value


def _takes_one_argument(function: Callable[..., float]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin that tells nothing about itself
        return False
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1:
        raise WrongType(f"weight takes {len(needed)} arguments; it is called with the bucket or with none")
    return len(needed) == 1


ROUNDING = 1e-9


def shares(weights: Sequence[float], max_share: float | None = None) -> list[float]:
    """Each rank's share of the sum of weights; the shares add up to 1. At least one weight is above 0.

    With ``max_share`` no share is larger than that: weights above a common level count as the level, which is
    the highest one possible (water-filling, from above). Where fewer than 1 / ``max_share`` ranks have a
    weight that is impossible; then they count the same. The order of the ranks does not matter.
    """
    if max_share is None:
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    level = _level([weight for weight in weights if weight > 0], max_share)
    cut = [min(weight, level) for weight in weights]
    total = math.fsum(cut)
    return [weight / total for weight in cut]


def _level(weights: list[float], max_share: float) -> float:
    """With m weights cut and R the sum of the others, level = max_share * (R + m * level)."""
    if len(weights) * max_share <= 1 + ROUNDING:
        return min(weights)
    weights = sorted(weights, reverse=True)
    level = weights[0]
    for cut, largest_uncut in enumerate(weights):
        if cut * max_share >= 1 - ROUNDING:  # at any level these have no more than their share
            return weights[cut - 1]
        level = max_share * math.fsum(weights[cut:]) / (1 - cut * max_share)
        if largest_uncut <= level:
            break
    return level
