"""The low-rank products in plain torch; ``products`` has the contract.

Skinny products keep the thin factor on the left, row-major: the other way round costs many times more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 65_536  # elements
LEAST = 1e-12  # of a row's square that must be new; below it, rounding to fp32 has made up the rest


def project_rows(
    g: Tensor, owed: Tensor | None, q: Tensor, p: Tensor, left: Tensor | None, keep_sum: bool
) -> None:
    if keep_sum and owed is not None:
        g += owed
        owed = None
    torch.mm(q, g.t(), out=p)
    if owed is None:
        return
    p.addmm_(q, owed.t())
    if left is not None:
        _settle(g, owed, owed, left, p, q, p.isfinite().all(0).unsqueeze(1))


def project_columns(
    g: Tensor, owed: Tensor | None, p: Tensor, q: Tensor, left: Tensor | None, summed: bool
) -> None:
    torch.mm(p, g, out=q)
    if owed is None:
        return
    if not summed:
        q.addmm_(p, owed)
    if left is not None:
        _settle(g, None if summed else owed, owed, left, p, q, q.isfinite().all(0).unsqueeze(0))


def _settle(
    g: Tensor, add: Tensor | None, owed: Tensor, left: Tensor, p: Tensor, q: Tensor, sound: Tensor
) -> None:
    """m is g + add, or g; ``owed`` is what stays."""
    usual = g.device.type == "cpu" and bool(sound.all())  # elsewhere, asking costs more than it saves
    sound = sound.expand_as(g)
    for rows, piece in _pieces(g):
        piece.copy_(g[rows]) if add is None else torch.add(g[rows], add[rows], out=piece)
        piece.addmm_(p[:, rows].t(), q, alpha=-1)
        if usual and piece.sum().isfinite():
            left[rows] = piece
        else:
            torch.where(piece.isfinite() & sound[rows], piece, owed[rows], out=left[rows])


def expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    for rows, term in _pieces(out):
        total = torch.mul(p[0, rows, None], q[0], out=out[rows])
        for k in range(1, len(p)):  # not addmm, not addcmul: they round once where this rounds twice
            total += torch.mul(p[k, rows, None], q[k], out=term)


def _pieces(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows that stay in the cache between two operations, and room for as many."""
    count, size = matrix.shape
    step = max(1, PIECE // max(1, size))
    room = matrix.new_empty(min(step, count), size)
    for start in range(0, count, step):
        rows = slice(start, min(count, start + step))
        yield rows, room[: rows.stop - start]


def orthonormalise(p: Tensor) -> bool:
    basis, sound = _gram_schmidt(p.to(torch.float64, copy=True), replace=False)
    if not sound:
        if not p.isfinite().all():
            return False
        basis, _ = _gram_schmidt(p.to(torch.float64, copy=True), replace=True)
    p.copy_(basis.add_(0.0))  # -0 becomes 0: which of them it was depends on the version
    return True


def _gram_schmidt(rows: Tensor, *, replace: bool) -> tuple[Tensor, bool]:
    """Classical Gram-Schmidt in place, every row twice (Giraud et al., 2005: that is enough).

    fp64 has room for the squares of all fp32 numbers, so nothing is scaled. Whether all went well is
    asked once at the end; only if it did not, again and row by row.
    """
    sound = []
    least = _halved((rows * rows).t()) * LEAST
    for k, row in enumerate(rows):
        row -= _within(rows[:k], row)
        row -= _within(rows[:k], row)
        square = _square(row)
        new = square > least[k]  # False for NaN too
        sound.append(new)
        if replace and not new:
            row.zero_()[_least_covered(rows[:k])] = 1.0
            row -= _within(rows[:k], row)
            row -= _within(rows[:k], row)
            square = _square(row)
        row *= _inverse_root(square)
    return rows, bool(torch.stack(sound).all())


def row_squares(q: Tensor) -> Tensor:
    wide = q.to(torch.float64)
    return _halved((wide * wide).t().contiguous())


def _within(basis: Tensor, row: Tensor) -> Tensor:
    """The part of a row that lies in the space of an orthonormal basis."""
    if not len(basis):
        return torch.zeros_like(row)
    parts = _halved((basis * row).t())
    return _halved(basis * parts.unsqueeze(1))


def _least_covered(basis: Tensor) -> Tensor:
    """The first of the unit vectors of which the basis has least."""
    return _halved(basis * basis).argmin() if len(basis) else torch.zeros((), dtype=torch.int64)


def _square(row: Tensor) -> Tensor:
    return _halved(row * row)


def _inverse_root(square: Tensor) -> Tensor:
    """1 / sqrt, to a few units in the last place.

    torch's own roots come from a vector library that does not round correctly, so their bits depend on the
    machine. Here: a guess from the halved exponent, within 4 %, then Newton's steps of plain products.
    """
    root = (0x5FE6_EB50_C7B5_37A9 - (square.view(torch.int64) >> 1)).view(torch.float64)
    for _ in range(5):
        root = root * (1.5 - square * 0.5 * root * root)
    return root


def _halved(terms: Tensor) -> Tensor:
    """The sum over the first dimension in a fixed tree, halves of a power of two added; overwrites terms."""
    count = len(terms)
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        terms[: count - half] += terms[half:count]
        count = half
    return terms[0]
