"""One rank's weight: a number, a function, or a count of tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
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
