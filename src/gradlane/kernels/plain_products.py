"""The low-rank products in plain torch; ``products`` has the contract.

Memory is read in runs of rows that stay in the second cache while several operations go over them. Skinny
products keep the thin factor on the left, row-major: the other way round costs many times more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

RUN = 262_144  # elements
TERMS = 65_536  # elements; many operations go over two such runs


def project_rows(
    g: Tensor, owed: Tensor | None, q: Tensor, p: Tensor, left: Tensor | None, keep_sum: bool
) -> None:
    if owed is None:
        torch.mm(q, g.t(), out=p)
        return
    room = None if keep_sum else _room(g)
    for rows in _runs(g):
        m = g[rows] if room is None else room[: rows.stop - rows.start]
        torch.add(g[rows], owed[rows], out=m)
        torch.mm(q, m.t(), out=p[:, rows])
        if left is not None:
            m.addmm_(p[:, rows].t(), q, alpha=-1)
            _put(m, p[:, rows].isfinite().all(0).unsqueeze(1), owed[rows], left[rows])


def project_columns(
    g: Tensor, owed: Tensor | None, p: Tensor, q: Tensor, left: Tensor | None, summed: bool
) -> None:
    apart = left is not None and owed is not None and left.data_ptr() != owed.data_ptr()
    m = g
    if summed or owed is None:
        torch.mm(p, g, out=q)
    elif left is None:
        torch.mm(p, g, out=q).addmm_(p, owed)
    else:
        m = left if apart else torch.empty_like(g)
        q.zero_()
        for rows in _runs(g):
            q.addmm_(p[:, rows], torch.add(g[rows], owed[rows], out=m[rows]))
    if left is None or owed is None:
        return
    sound, room = q.isfinite().all(0), _room(g) if m is g and not apart else m
    for rows in _runs(g):
        to = left[rows] if apart else room[rows] if room is m else room[: rows.stop - rows.start]
        torch.addmm(m[rows], p[:, rows].t(), q, alpha=-1, out=to)
        _put(to, sound, owed[rows], left[rows])


def _put(m: Tensor, sound: Tensor, owed: Tensor, left: Tensor) -> None:
    """What is left goes to its place, if it is not there; ``owed`` stays where it is not finite or its factor
    is not sound."""
    on_cpu = m.device.type == "cpu"  # elsewhere, asking costs more than it saves
    if not (on_cpu and m.sum().isfinite() and sound.all()):
        m.copy_(torch.where(m.isfinite() & sound, m, owed))
    if m.data_ptr() != left.data_ptr():
        left.copy_(m)


def expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    total, term = _room(out, TERMS), _room(out, TERMS)
    step, rows = len(total), q.unbind()
    parts = zip(*(torch.split(row, step) for row in p.unsqueeze(2).unbind()), strict=True)
    for to, columns in zip(torch.split(out, step), parts, strict=True):
        total, term = total[: len(to)], term[: len(to)]  # the last run is shorter
        torch.mul(columns[0], rows[0], out=total if len(rows) > 1 else to)
        for k in range(1, len(rows)):
            # not addmm, not addcmul: they round once where this rounds twice
            torch.mul(columns[k], rows[k], out=term)
            torch.add(total, term, out=total if k < len(rows) - 1 else to)


def _runs(matrix: Tensor, elements: int = RUN) -> Iterator[slice]:
    count, size = matrix.shape
    step = max(1, elements // max(1, size))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def _room(matrix: Tensor, elements: int = RUN) -> Tensor:
    """For as many rows as a run has."""
    count, size = matrix.shape
    return matrix.new_empty(min(count, max(1, elements // max(1, size))), size)
