"""What each rank counts for: its weight, and its share of the whole."""

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


class Mine(NamedTuple):
    """This rank's weight in a step, and the number that makes its gradient ``weight`` times its mean."""

    weight: float
    times: float


class Asked:
    """Asks for the weight once per step, so that all buckets of a step agree."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._answer: tuple[int, Mine] | None = None  # (step, its answer)
        self._takes_bucket = callable(weight) and _takes_one_argument(weight)
        self._fixed = None if callable(weight) or isinstance(weight, TokenCount) else _checked(weight)

    def mine(self, bucket: Bucket) -> Mine:
        if bucket.joined:
            return Mine(0.0, 0.0)
        if self._fixed is not None:
            return Mine(self._fixed, self._fixed)
        if bucket.flat.device.type == "meta":
            return Mine(1.0, 1.0)  # a dry run must not ask: the answer may not be there yet
        if self._answer is None or self._answer[0] != bucket.step or bucket.index == 0:
            self._answer = (bucket.step, self._ask(bucket))
        return self._answer[1]

    def _ask(self, bucket: Bucket) -> Mine:
        if isinstance(self._weight, TokenCount):
            count, unit = self._weight.take()
            return Mine(_checked(count), unit)
        assert callable(self._weight)
        answer = self._weight(bucket) if self._takes_bucket else self._weight()  # type: ignore[call-arg]
        weight = _checked(answer)
        return Mine(weight, weight)


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
    """Each rank's part of the whole; the parts add up to 1. At least one weight is above 0.

    With ``max_share`` no part is larger than that: weights above a common level count as the level, which
    is the
    highest that keeps to it (water-filling, from above). Where fewer than 1 / ``max_share`` ranks have a
    weight
    that cannot be; they count the same then. Only the weights decide, not the order of the ranks.
    """
    if max_share is None:
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    level = _level([weight for weight in weights if weight > 0], max_share)
    cut = [min(weight, level) for weight in weights]
    total = math.fsum(cut)
    return [weight / total for weight in cut]


def _level(weights: list[float], max_share: float) -> float:
    """With m weights cut and a rest R of the others, level = max_share * (R + m * level)."""
    if len(weights) * max_share <= 1 + ROUNDING:
        return min(weights)
    weights = sorted(weights, reverse=True)
    level = weights[0]
    for cut, largest_left in enumerate(weights):
        if (
            cut * max_share >= 1 - ROUNDING
        ):  # so many have no more than their share at any level: at their own
            return weights[cut - 1]
        level = max_share * math.fsum(weights[cut:]) / (1 - cut * max_share)
        if largest_left <= level:
            break
    return level
