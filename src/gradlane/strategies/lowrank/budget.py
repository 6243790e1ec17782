"""What passes in one step, and how much of it a budget allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import InvalidValue


class Layer(NamedTuple):
    """A matrix that may travel as factors: the elements of one rank of it, and the most ranks it may have."""

    cost: int
    most: int


class Passed:
    """What has passed of a step: elements of gradient, those that are dense, and the matrices."""

    def __init__(self, numel: int = 0, dense: int = 0) -> None:
        self.numel, self.dense = numel, dense
        self.layers: dict[str, Layer] = {}

    def add(self, numel: int, dense: int, layers: Mapping[str, Layer]) -> None:
        self.numel += numel
        self.dense += dense
        self.layers.update(layers)

    def allowed(self, share: float) -> int:
        return int(share * self.numel)

    def spent(self, ranks: Mapping[str, int]) -> int:
        """Elements that travel, as far as the ranks are known."""
        return self.dense + sum(layer.cost * ranks.get(n, 0) for n, layer in self.layers.items())

    def check(self, share: float) -> None:
        """Refuse a share that cannot be kept even with rank 1 everywhere."""
        allowed, least = self.allowed(share), self.spent(dict.fromkeys(self.layers, 1))
        if least <= allowed:
            return
        needed = math.ceil(1000 * least / self.numel) / 1000
        way_out = f"use budget={needed:g} or more" if needed < 1 else "leave the budget out"
        raise InvalidValue(
            f"budget={share:g} allows {allowed:,} of {self.numel:,} elements a step, but {self.dense:,} are "
            f"dense and rank 1 of {len(self.layers)} matrices is {least - self.dense:,}; "
            f"{way_out}, or give the dense ones a strategy of their own with Route(...)"
        )

    def same_rank(self, share: float, ranks: Mapping[str, int], fresh: Sequence[str]) -> dict[str, int]:
        """One rank for all fresh matrices: the largest with which all that has passed is within its share."""
        layers = [self.layers[name] for name in fresh]
        room, rank = self.allowed(share) - self.spent(ranks), 1
        while rank < max(most for _, most in layers) and room >= sum(
            cost * min(rank + 1, most) for cost, most in layers
        ):
            rank += 1
        return {name: min(rank, layer.most) for name, layer in zip(fresh, layers, strict=True)}
