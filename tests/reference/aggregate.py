"""Rules over ranks, slowly and directly: on whole vectors in fp64, as their papers state them."""

import itertools

import torch


def distance(a, b):
    return float((a - b).norm())


def median(rows):
    ordered = rows.sort(0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def trimmed_mean(rows, trim):
    return rows.sort(0).values[trim : len(rows) - trim].mean(0)


def near_median(rows, keep):
    middle, answer = median(rows), torch.empty_like(rows[0])
    for column, to in enumerate(middle.tolist()):
        nearest = sorted((abs(value - to), value) for value in rows[:, column].tolist())
        answer[column] = sum(value for _, value in nearest[:keep]) / keep
    return answer


def score(rows, i, neighbours):
    """Krum's, and where that is equal the same of all others."""
    others = sorted(distance(rows[i], rows[j]) ** 2 for j in range(len(rows)) if j != i)
    return sum(others[:neighbours]), sum(others)


def krum(rows, f):
    return rows[min(range(len(rows)), key=lambda i: score(rows, i, len(rows) - f - 2))]


def multi_krum(rows, f, m=None):
    best = sorted(range(len(rows)), key=lambda i: score(rows, i, len(rows) - f - 1))
    return rows[best[: m or len(rows) - f]].mean(0)


def bulyan(rows, f):
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f:
        neighbours = max(1, len(left) - f - 2)
        best = min(range(len(left)), key=lambda i: score(rows[left], i, neighbours))
        chosen.append(left.pop(best))
    return near_median(rows[chosen], len(rows) - 4 * f)


def start(rows):
    """The mean of those that are nearest to the medoid, and how far the last of them is."""
    medoid = min(rows, key=lambda row: sum(distance(row, other) for other in rows))
    majority = sorted(rows, key=lambda row: distance(row, medoid))[: len(rows) // 2 + 1]
    return torch.stack(majority).mean(0), max(distance(row, medoid) for row in majority)


def geometric_median(rows):
    centre, radius = start(rows)
    for _ in range(2000):
        weights = torch.tensor([1 / max(distance(row, centre), 1e-6 * radius) for row in rows])
        centre = (weights.double()[:, None] * rows).sum(0) / weights.sum()
    return centre


def centered_clipping(rows, tau=None, iterations=3):
    centre, _ = start(rows)
    for _ in range(iterations):
        away = [distance(row, centre) for row in rows]
        limit = sorted(away)[(len(rows) - 1) // 2] if tau is None else tau
        centre = centre + sum(
            (row - centre) * min(1.0, limit / far) if far else row - centre
            for row, far in zip(rows, away, strict=True)
        ) / len(rows)
    return centre


def adasum(rows):
    rows = list(rows)
    if len(rows) == 1:
        return rows[0]
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    return adasum([_adasum_of_two(*pair) if len(pair) == 2 else pair[0] for pair in pairs])


def _adasum_of_two(a, b):
    product = a.dot(b)
    return sum((1 - product / (2 * row.dot(row))) * row if row.any() else row for row in (a, b))


def mixed(rows, f):
    """Nearest-neighbour mixing."""
    near = [sorted(range(len(rows)), key=lambda j: (distance(rows[i], rows[j]), j)) for i in range(len(rows))]
    return torch.stack([rows[order[: len(rows) - f]].mean(0) for order in near])


def smallest_sum_of_distances(rows, found):
    """Whether no small step away from ``found`` is nearer to all: how a geometric median is checked."""
    at = sum(distance(row, found) for row in rows)
    size = max(distance(row, found) for row in rows)
    directions = itertools.chain(rows - found, torch.eye(rows.shape[1], dtype=rows.dtype)[:8] * size)
    steps = [found + scale * way for way in directions for scale in (1e-3, -1e-3)]
    return all(sum(distance(row, step) for row in rows) >= at - 1e-9 * size for step in steps)
