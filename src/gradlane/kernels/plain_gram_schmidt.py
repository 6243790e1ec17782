"""Gram-Schmidt in plain torch, with the bits of csrc/orthonormal_loops.h; ``products`` has the contract.

A call of torch costs more than the arithmetic on a row. So matrices of one rank and about one size are
computed together, padded with zeros, which change no sum. And the last few terms of every sum are added as
Python's floats, which are rounded alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

FEW = 128  # terms of all sums together; as many additions in Python take as long as two or three torch calls
MIN_NEW_PART = 1e-12  # share of a row's square that must be new; less than that is fp32 rounding error


def orthonormalise_all(factors: Sequence[Tensor]) -> list[bool]:
    results = [True] * len(factors)
    batches: dict[object, list[int]] = {}
    for i, p in enumerate(factors):
        batches.setdefault((len(p), _half_of(p.shape[1]), p.dtype, p.device), []).append(i)
    for indices in batches.values():
        batch = [factors[i] for i in indices]
        bases, finite = _gram_schmidt(batch)
        for i, p, basis, is_finite in zip(indices, batch, bases, finite, strict=True):
            results[i] = is_finite
            if is_finite:
                p.copy_(basis[:, : p.shape[1]])
    return results


def _gram_schmidt(batch: list[Tensor]) -> tuple[Tensor, list[bool]]:
    """Classical Gram-Schmidt, every row twice (Giraud et al., 2005: that is enough).

    The squares of all fp32 numbers fit into fp64, so nothing is scaled. A non-finite number makes the square
    of its row non-finite.
    """
    sizes, finite = [p.shape[1] for p in batch], [True] * len(batch)
    rows = batch[0].new_zeros(len(batch), len(batch[0]), max(sizes), dtype=torch.float64)
    for p, padded in zip(batch, rows, strict=True):
        padded[:, : p.shape[1]].copy_(p)
    before = _sums(rows * rows)
    for k in range(rows.shape[1]):
        basis, row = rows[:, :k], rows[:, k]
        squares = _squares_without(basis, row)
        for i, square in enumerate(squares):
            if square > before[i * rows.shape[1] + k] * MIN_NEW_PART:  # false for NaN
                continue
            finite[i] = finite[i] and bool(batch[i].isfinite().all())
            if finite[i]:
                row[i].zero_()[_least_covered(basis[i, :, : sizes[i]])] = 1.0
                squares[i] = _squares_without(basis[i : i + 1], row[i : i + 1])[0]
        row.mul_(_numbers([_inverse_root(square) for square in squares], row).unsqueeze(1))
    return rows.add_(0.0), finite  # -0 becomes 0: the sign of zero depends on the version of the kernels


def _squares_without(basis: Tensor, row: Tensor) -> list[float]:
    """Subtract from a row its projection on an orthonormal basis, twice; return the square of the row."""
    for _ in range(2 if basis.shape[1] else 0):
        coefficients = _numbers(_sums(basis * row.unsqueeze(1)), row)
        row.sub_(_tree_sum(basis * coefficients.view(*basis.shape[:2], 1), 1).select(1, 0))
    return _sums(row * row)


def _least_covered(basis: Tensor) -> Tensor | int:
    """The index of the unit vector with the shortest projection on the basis; the first of several."""
    return _tree_sum(basis * basis, 0)[0].argmin() if len(basis) else 0


def _inverse_root(square: float) -> float:
    """1 / sqrt, to a few units in the last place.

    torch's own roots come from a vector library that does not round correctly, so their bits depend on the
    machine. This starts from the halved exponent, within 4 %, and continues with Newton's steps.
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", square))
    (root,) = struct.unpack("<d", struct.pack("<q", 0x5FE6_EB50_C7B5_37A9 - (bits >> 1)))
    for _ in range(5):
        root = root * (1.5 - square * 0.5 * root * root)
    return float(root)


def _sums(terms: Tensor) -> list[float]:
    """The sum of each row; overwrites terms."""
    return [_sum(row) for row in _tree_sum(terms, -1, FEW).flatten(0, -2).tolist()]


def _sum(terms: list[float]) -> float:
    """The sum in the order of a fixed tree: halves of a power of two are added."""
    while (count := len(terms)) > 1:
        half = _half_of(count)
        upper = terms[half:]
        terms = [low + high for low, high in zip(terms, upper, strict=False)] + terms[len(upper) : half]
    return terms[0]


def _tree_sum(terms: Tensor, dim: int, few: int = 0) -> Tensor:
    """The same tree along a dimension, down to one term, or ``few`` terms of all sums; overwrites terms."""
    count, others = terms.shape[dim], terms.numel() // terms.shape[dim]
    while count > 1 and count * others > few:
        half = _half_of(count)
        terms.narrow(dim, 0, count - half).add_(terms.narrow(dim, half, count - half))
        count = half
    return terms.narrow(dim, 0, count)


def _half_of(count: int) -> int:
    """Half of the least power of two that is at least ``count``."""
    return 1 << max(0, (count - 1).bit_length() - 1)


def _numbers(numbers: list[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)
