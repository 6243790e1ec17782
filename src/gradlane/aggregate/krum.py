"""Rules that choose ranks by their distance to their nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidValue
from .distances import squared_distances
from .elementwise import NearMedian
from .mixture import Mixture
from .rule import GramRule, check_at_least, check_count, check_minority


@dataclass(frozen=True)
class Krum(GramRule):
    """The gradient of one rank: the one with the smallest sum of squared distances to its n - f - 2 nearest.

    Blanchard et al., 2017, "Machine learning with adversaries". Needs n >= 2 f + 3: the breakdown point is
    (n - 3) / 2 of n. It uses one gradient of n, so its noise is that of one rank.
    """

    f: int
    wrong = "f"

    def __post_init__(self) -> None:
        check_count(self, "f")

    def check(self, ranks: int) -> None:
        check_at_least(self, self.f, ranks, 2 * self.f + 3, (ranks - 3) // 2)

    def mixture(self, gram: Tensor) -> Mixture:
        order = by_closeness(squared_distances(gram), len(gram) - self.f - 2)
        return Mixture(_equally(order[:1], len(gram)))


@dataclass(frozen=True)
class MultiKrum(GramRule):
    """The mean of the ``m`` gradients (default n - f) with the smallest sums of squared distances to their
    n - f - 1 nearest.

    After Blanchard et al., 2017, who count n - f - 2 neighbours. With one more, each of f wrong gradients
    has a right one among its neighbours when n > 2 f: far from all right ones it is never among the n - f
    nearest, so the breakdown point is 1/2. Needs n > 2 f and m <= n - f. How near to the mean of the right
    ones it stays is another question; see Bareilles et al., 2026, "Byzantine machine learning: MultiKrum and
    an optimal notion of robustness".
    """

    f: int
    m: int | None = None
    wrong = "f"

    def __post_init__(self) -> None:
        check_count(self, "f")
        if self.m is not None:
            check_count(self, "m", least=1)

    def check(self, ranks: int) -> None:
        check_minority(self, self.f, ranks)
        if self.m is not None and self.m > ranks - self.f:
            raise InvalidValue(
                f"MultiKrum m={self.m} is more than f={self.f} leaves of {ranks} ranks; "
                f"use m <= {ranks - self.f}, or leave it out"
            )

    def mixture(self, gram: Tensor) -> Mixture:
        ranks = len(gram)
        order = by_closeness(squared_distances(gram), ranks - self.f - 1)
        return Mixture(_equally(order[: self.m or ranks - self.f], ranks))


@dataclass(frozen=True)
class Bulyan(GramRule):
    """n - 2 f gradients, chosen one after the other by Krum; then for each element the mean of the n - 4 f
    values nearest to their median.

    El Mhamdi et al., 2018, "The hidden vulnerability of distributed learning in Byzantium". Needs n >= 4 f
    + 3: breakdown point 1/4. Against attacks that hide in a few elements of a gradient that is close as a
    whole.
    """

    f: int
    wrong = "f"

    def __post_init__(self) -> None:
        check_count(self, "f")

    def check(self, ranks: int) -> None:
        check_at_least(self, self.f, ranks, 4 * self.f + 3, (ranks - 3) // 4)

    def mixture(self, gram: Tensor) -> Mixture:
        squares, ranks = squared_distances(gram), len(gram)
        remaining = list(range(ranks))
        chosen: list[int] = []
        while len(chosen) < ranks - 2 * self.f:
            among = squares[remaining][:, remaining]
            best = by_closeness(among, max(1, len(remaining) - self.f - 2))[0]
            chosen.append(remaining.pop(int(best)))
        selected = torch.zeros(len(chosen), ranks, dtype=gram.dtype)
        selected[torch.arange(len(chosen)), torch.tensor(chosen)] = 1
        return Mixture(selected, NearMedian(ranks - 4 * self.f))


def by_closeness(squares: Tensor, neighbours: int) -> Tensor:
    """Ranks in the order of Krum's score: the sum of squared distances to so many nearest neighbours.

    Two that are each other's nearest often have the same score; then the distances to all decide.
    """
    ordered = squares.sort(dim=1).values[:, 1:]
    first = ordered.sum(1).argsort(stable=True)
    return first[ordered[first, :neighbours].sum(1).argsort(stable=True)]


def _equally(chosen: Tensor, ranks: int) -> Tensor:
    weights = torch.zeros(1, ranks, dtype=torch.float64)
    weights[0, chosen] = 1 / len(chosen)
    return weights
