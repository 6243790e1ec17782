"""The best ranks under a limit, by trying all of them."""

from itertools import product


def best_energy(items, room):
    """The most energy that ranks from 1 up carry together within the room."""
    found = []
    for ranks in product(*(range(1, len(gains) + 1) for _, gains in items)):
        if sum(cost * rank for (cost, _), rank in zip(items, ranks, strict=True)) <= room:
            found.append(energy(items, ranks))
    return max(found)


def energy(items, ranks):
    return sum(sum(gains[:rank]) for (_, gains), rank in zip(items, ranks, strict=True))
