"""Gram-Schmidt in plain torch, with the bits of csrc/orthonormal.h; ``products`` has the contract.

A call of torch costs more than the work on a row. So matrices of one rank and about one size go through it
together, filled up with zeros, which change no sum. And the last few terms of every sum are added up as
Python's floats, which are rounded alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

FEW = 128  # terms of all sums together; as many additions here take as long as two or three calls there
LEAST = 1e-12  # of a row's square that must be new; below it, rounding to fp32 has made up the rest


def orthonormalise_all(factors: Sequence[Tensor]) -> list[bool]:
    done = [True] * len(factors)
    alike: dict[object, list[int]] = {}
    for place, p in enumerate(factors):
        alike.setdefault((len(p), _half_of(p.shape[1]), p.dtype, p.device), []).append(place)
    for places in alike.values():
        given = [factors[place] for place in places]
        basis, finite = _gram_schmidt(given)
        for place, p, own, fine in zip(places, given, basis, finite, strict=True):
            done[place] = fine
            if fine:
                p.copy_(own[:, : p.shape[1]])
    return done


def _gram_schmidt(given: list[Tensor]) -> tuple[Tensor, list[bool]]:
    """Classical Gram-Schmidt, every row twice (Giraud et al., 2005: that is enough).

    fp64 has room for the squares of all fp32 numbers, so nothing is scaled. A number that is not finite
    shows in the square of its row.
    """
    sizes, finite = [p.shape[1] for p in given], [True] * len(given)
    rows = given[0].new_zeros(len(given), len(given[0]), max(sizes), dtype=torch.float64)
    for p, own in zip(given, rows, strict=True):
        own[:, : p.shape[1]].copy_(p)
    before = _sums(rows * rows)
    for k in range(rows.shape[1]):
        basis, row = rows[:, :k], rows[:, k]
        squares = _squares_without(basis, row)
        for i, square in enumerate(squares):
            if square > before[i * rows.shape[1] + k] * LEAST:  # not so for NaN
                continue
            finite[i] = finite[i] and bool(given[i].isfinite().all())
            if finite[i]:
                row[i].zero_()[_least_covered(basis[i, :, : sizes[i]])] = 1.0
                squares[i] = _squares_without(basis[i : i + 1], row[i : i + 1])[0]
        row.mul_(_numbers([_inverse_root(square) for square in squares], row).unsqueeze(1))
    return rows.add_(0.0), finite  # -0 becomes 0: which of them it was depends on the version


def row_squares(q: Tensor) -> Tensor:
    wide = q.to(torch.float64)
    return _numbers(_sums(wide * wide), wide)


def _squares_without(basis: Tensor, row: Tensor) -> list[float]:
    """Take its part in the space of an orthonormal basis off a row, twice; the square of what is left."""
    for _ in range(2 if basis.shape[1] else 0):
        parts = _numbers(_sums(basis * row.unsqueeze(1)), row)
        row.sub_(_halved(basis * parts.view(*basis.shape[:2], 1), 1).select(1, 0))
    return _sums(row * row)


def _least_covered(basis: Tensor) -> Tensor | int:
    """The first of the unit vectors of which the basis has least."""
    return _halved(basis * basis, 0)[0].argmin() if len(basis) else 0


def _inverse_root(square: float) -> float:
    """1 / sqrt, to a few units in the last place.

    torch's own roots come from a vector library that does not round correctly, so their bits depend on the
    machine. Here: a guess from the halved exponent, within 4 %, then Newton's steps of plain products.
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", square))
    (root,) = struct.unpack("<d", struct.pack("<q", 0x5FE6_EB50_C7B5_37A9 - (bits >> 1)))
    for _ in range(5):
        root = root * (1.5 - square * 0.5 * root * root)
    return float(root)


def _sums(terms: Tensor) -> list[float]:
    """The sum of each row, one after the other; overwrites terms."""
    return [_sum(row) for row in _halved(terms, -1, FEW).flatten(0, -2).tolist()]


def _sum(terms: list[float]) -> float:
    """In a fixed tree: halves of a power of two are added."""
    while (count := len(terms)) > 1:
        half = _half_of(count)
        rest = terms[half:]
        terms = [low + high for low, high in zip(terms, rest, strict=False)] + terms[len(rest) : half]
    return terms[0]


def _halved(terms: Tensor, dim: int, few: int = 0) -> Tensor:
    """The same tree along a dimension, until one is left, or few of all; overwrites terms."""
    count, others = terms.shape[dim], terms.numel() // terms.shape[dim]
    while count > 1 and count * others > few:
        half = _half_of(count)
        terms.narrow(dim, 0, count - half).add_(terms.narrow(dim, half, count - half))
        count = half
    return terms.narrow(dim, 0, count)


def _half_of(count: int) -> int:
    """Half of the least power of two that holds so many."""
    return 1 << max(0, (count - 1).bit_length() - 1)


def _numbers(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)
