"""The low-rank products in plain torch; ``products`` has the contract.

Memory is read in runs of rows that stay in the second cache while several operations go over them. Skinny
products keep the thin factor on the left, row-major: the other way round costs many times more.

The BLAS may add up in another order where a matrix begins elsewhere in a line of the cache. So it gets every
matrix, and puts every result, at the beginning of one: the bits depend on shapes and values alone, and a
resumed run has those of the run that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

RUN = 262_144  # elements
TERMS = 65_536  # elements; many operations go over two such runs
LINE = 64  # bytes; where torch begins what it allocates on a CPU, and the longest vector


def project_rows(
    g: Tensor, residual: Tensor | None, q: Tensor, p: Tensor, residual_out: Tensor | None, keep_sum: bool
) -> None:
    if residual is None and g.device.type != "cpu":
        torch.mm(q, g.t(), out=p)
        return
    q, room, keep_sum = at_line(q), _room(g), keep_sum and residual is not None
    for rows in _runs(g):
        own = g[rows]
        to = own if keep_sum and _begins_line(own) else room
        m = _sum(own, None if residual is None else residual[rows], to)
        part = torch.mm(q, m.t())
        p[:, rows] = part
        if keep_sum and to is room:
            own.copy_(m)
        if residual_out is not None and residual is not None:
            m.addmm_(part.t(), q, alpha=-1)
            _put(m, part.isfinite().all(0).unsqueeze(1), residual[rows], residual_out[rows])


def project_columns(
    g: Tensor, residual: Tensor | None, p: Tensor, q: Tensor, residual_out: Tensor | None, summed: bool
) -> None:
    added = None if summed else residual
    if added is None and residual_out is None and g.device.type != "cpu":
        torch.mm(p, g, out=q)
        return
    room, total = _room(g), torch.zeros_like(q)
    for rows in _runs(g):
        total.addmm_(at_line(p[:, rows]), _sum(g[rows], None if added is None else added[rows], room))
    q.copy_(total)
    if residual_out is None or residual is None:
        return
    finite, apart = total.isfinite().all(0), residual_out.data_ptr() != residual.data_ptr()
    for rows in _runs(g):
        to = residual_out[rows] if apart and _begins_line(residual_out[rows]) else room
        m = _sum(g[rows], None if added is None else added[rows], to, own=True)
        m.addmm_(at_line(p[:, rows]).t(), total, alpha=-1)
        _put(m, finite, residual[rows], residual_out[rows])


def at_line(matrix: Tensor) -> Tensor:
    """The same numbers where a line begins: itself, or a copy."""
    return matrix if _begins_line(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def _begins_line(matrix: Tensor) -> bool:
    """Other devices have no such lines."""
    return matrix.is_contiguous() and (matrix.device.type != "cpu" or matrix.data_ptr() % LINE == 0)


def _sum(g: Tensor, residual: Tensor | None, to: Tensor, *, own: bool = False) -> Tensor:
    """g + residual where a line begins, in ``to``; g itself where that is one already, unless the caller will
    write to it (``own``)."""
    m = to[: len(g)]
    if residual is not None:
        return torch.add(g, residual, out=m)
    return g if _begins_line(g) and not own else m.copy_(g)


def _put(m: Tensor, finite: Tensor, residual: Tensor, residual_out: Tensor) -> None:
    """What is left goes to its place, if it is not there; ``residual`` stays where it is not finite or its
    factor
    is not finite."""
    on_cpu = m.device.type == "cpu"  # elsewhere, asking costs more than it saves
    if not (on_cpu and m.sum().isfinite() and finite.all()):
        residual_out.copy_(torch.where(m.isfinite() & finite, m, residual))
    elif m.data_ptr() != residual_out.data_ptr():
        residual_out.copy_(m)


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
