"""Ranks for many matrices under one limit: those that carry the most energy together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

CELLS = 8192  # of the table, at most: more of them cost time, fewer waste some of the room


class Item(NamedTuple):
    """A matrix: what each rank of it costs, and the energy that each adds, as many as it may have."""

    cost: int
    gains: Sequence[float]


def ranks_within(items: Sequence[Item], room: int) -> list[int]:
    """A rank from 1 up for every item, with the most energy that fits; L-GreCo (Markov et al., 2023) asks so.

    The first ranks must fit. Further ones are found by the table of all limits up to ``room``, in cells of
    the costs' common divisor: exactly the best. If that makes too many cells they are wider and costs are
    rounded up to them; what that wastes is then handed out one by one. The same bits everywhere: plain fp64
    sums and comparisons in a fixed order; of equals, fewer ranks win.
    """
    left = room - sum(item.cost for item in items)
    cell = max(math.gcd(*(item.cost for item in items)), -(-left // CELLS), 1)
    chosen = _backwards(items, _tables(items, left // cell, cell), left // cell, cell)
    left -= sum(item.cost * (rank - 1) for item, rank in zip(items, chosen, strict=True))
    return _rounded_up(items, chosen, left)


def _tables(items: Sequence[Item], cells: int, cell: int) -> list[np.ndarray]:
    """For each item and each limit: the ranks beyond its first, when it and those before share the limit."""
    best, tables = np.zeros(cells + 1), []
    for cost, gains in items:
        most, ranks, total = best.copy(), np.zeros(cells + 1, np.min_scalar_type(len(gains))), 0.0
        for extra, gain in enumerate(gains[1:], start=1):
            total += gain
            width = -(-cost * extra // cell)
            if width > cells:
                break
            found = best[: cells + 1 - width] + total
            better = found > most[width:]
            np.copyto(most[width:], found, where=better)
            np.copyto(ranks[width:], extra, where=better)
        best = most
        tables.append(ranks)
    return tables


def _backwards(items: Sequence[Item], tables: list[np.ndarray], cells: int, cell: int) -> list[int]:
    chosen = []
    for (cost, _), ranks in zip(reversed(items), reversed(tables), strict=True):
        extra = int(ranks[cells])
        cells -= -(-cost * extra // cell)
        chosen.append(1 + extra)
    return chosen[::-1]


def _rounded_up(items: Sequence[Item], chosen: list[int], left: int) -> list[int]:
    """One rank at a time for the item that gains most for its cost, of equals the first."""
    waiting = [entry for place in range(len(items)) for entry in _offer(items, chosen, place)]
    heapify(waiting)
    while waiting:
        _, place = heappop(waiting)
        if items[place].cost <= left:  # else it will never fit: what is left only shrinks
            chosen[place] += 1
            left -= items[place].cost
            for entry in _offer(items, chosen, place):
                heappush(waiting, entry)
    return chosen


def _offer(items: Sequence[Item], chosen: list[int], place: int) -> Iterator[tuple[float, int]]:
    """What the next rank of an item gains, smaller for more; nothing where there is none."""
    (cost, gains), rank = items[place], chosen[place]
    if rank < len(gains) and gains[rank] > 0:
        yield -gains[rank] / cost, place
