"""The low-rank products in plain torch; ``products`` has the contract.

Memory is read in runs of rows that stay in the second cache while several operations go over them. Skinny
products keep the thin factor on the left, row-major: the other way round costs many times more.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

RUN = 131_072  # elements
TERMS = 65_536  # elements; expand goes over two such runs at once


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
    add = None if summed else owed
    if left is None and add is None:
        torch.mm(p, g, out=q)
        return
    if left is None:
        whole = _room(g)
    else:
        assert owed is not None
        whole = torch.empty_like(g) if left.data_ptr() == owed.data_ptr() else left
    q.zero_()
    for rows in _runs(g):
        m = whole[: rows.stop - rows.start] if left is None else whole[rows]
        m.copy_(g[rows]) if add is None else torch.add(g[rows], add[rows], out=m)
        q.addmm_(p[:, rows], m)
    if left is None:
        return
    assert owed is not None
    sound = q.isfinite().all(0)
    for rows in _runs(g):
        m = whole[rows].addmm_(p[:, rows].t(), q, alpha=-1)
        _put(m, sound, owed[rows], left[rows])


def _put(m: Tensor, sound: Tensor, owed: Tensor, left: Tensor) -> None:
    """What is left goes to its place, if it is not there; ``owed`` stays where it is not finite or its factor
    is not sound."""
    on_cpu = m.device.type == "cpu"  # elsewhere, asking costs more than it saves
    if not (on_cpu and m.sum().isfinite() and sound.all()):
        m.copy_(torch.where(m.isfinite() & sound, m, owed))
    if m.data_ptr() != left.data_ptr():
        left.copy_(m)


def expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    first, *others = q
    room = _room(out, TERMS)
    for rows in _runs(out, TERMS):
        column, *columns = p[:, rows].unsqueeze(2)
        total = torch.mul(column, first, out=out[rows])
        term = room[: len(total)]
        for column, row in zip(columns, others, strict=True):
            # not addmm, not addcmul: they round once where this rounds twice
            total.add_(torch.mul(column, row, out=term))


def _runs(matrix: Tensor, elements: int = RUN) -> Iterator[slice]:
    count, size = matrix.shape
    step = max(1, elements // max(1, size))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def _room(matrix: Tensor, elements: int = RUN) -> Tensor:
    """For as many rows as a run has."""
    count, size = matrix.shape
    return matrix.new_empty(min(count, max(1, elements // max(1, size))), size)
