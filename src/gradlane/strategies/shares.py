"""What each rank counts for, when ranks say themselves how much they weigh."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-9


def shares(weights: Sequence[float], most: float | None = None) -> list[float]:
    """Each rank's part of the whole; the parts add up to 1. At least one weight is above 0.

    With ``most`` no part is larger than that: weights above a common level count as the level, which is the
    highest that keeps to it (water-filling, from above). Where fewer than 1 / ``most`` ranks have a weight
    that cannot be; they count the same then. Only the weights decide, not the order of the ranks.
    """
    if most is None:
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    level = _level([weight for weight in weights if weight > 0], most)
    cut = [min(weight, level) for weight in weights]
    total = math.fsum(cut)
    return [weight / total for weight in cut]


def _level(weights: list[float], most: float) -> float:
    """With m weights cut and a rest R of the others, level = most * (R + m * level)."""
    if len(weights) * most <= 1 + ROUNDING:
        return min(weights)
    weights = sorted(weights, reverse=True)
    level = weights[0]
    for cut, largest_left in enumerate(weights):
        if cut * most >= 1 - ROUNDING:  # so many have no more than their share at any level: at their own
            return weights[cut - 1]
        level = most * math.fsum(weights[cut:]) / (1 - cut * most)
        if largest_left <= level:
            break
    return level
