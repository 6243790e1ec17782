"""The low-rank products in plain torch; ``products`` has the contract.

Memory is read in runs of rows that stay in the second-level cache while several operations read them. Thin
products keep the thin factor on the left, row-major: the other way round costs many times more.

A BLAS may sum in another order if a matrix begins elsewhere in a cache line. So every matrix that it reads or
writes begins a line. Then the bits depend on shapes and values alone, and a resumed run has the same bits as
one that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.streams import exact_products

RUN = 262_144  # elements
TERMS = 65_536  # elements; expand goes over two such buffers
LINE = 64  # bytes of a cache line; torch allocates at multiples of it on a CPU


def project_rows(
    g: Tensor, residual: Tensor | None, q: Tensor, p: Tensor, residual_out: Tensor | None, keep_sum: bool
) -> None:
    if residual is None and g.device.type != "cpu":
        torch.mm(q, g.t(), out=p)
        return
    q, buffer, keep_sum = at_line(q), _buffer(g), keep_sum and residual is not None
    for rows in _runs(g):
        run = g[rows]
        to = run if keep_sum and _begins_line(run) else buffer
        m = _sum(run, None if residual is None else residual[rows], to)
        part = torch.mm(q, m.t())
        p[:, rows] = part
        if keep_sum and to is buffer:
            run.copy_(m)
        if residual_out is not None and residual is not None:
            with exact_products(m.device):
                m.addmm_(part.t(), q, alpha=-1)
            _write(m, part.isfinite().all(0).unsqueeze(1), residual[rows], residual_out[rows])


def project_columns(
    g: Tensor, residual: Tensor | None, p: Tensor, q: Tensor, residual_out: Tensor | None, summed: bool
) -> None:
    added = None if summed else residual
    if added is None and residual_out is None and g.device.type != "cpu":
        torch.mm(p, g, out=q)
        return
    buffer, total = _buffer(g), torch.zeros_like(q)
    for rows in _runs(g):
        total.addmm_(at_line(p[:, rows]), _sum(g[rows], None if added is None else added[rows], buffer))
    q.copy_(total)
    if residual_out is None or residual is None:
        return
    finite, in_place = total.isfinite().all(0), residual_out.data_ptr() == residual.data_ptr()
    for rows in _runs(g):
        to = residual_out[rows] if not in_place and _begins_line(residual_out[rows]) else buffer
        m = _sum(g[rows], None if added is None else added[rows], to, copy=True)
        with exact_products(m.device):
            m.addmm_(at_line(p[:, rows]).t(), total, alpha=-1)
        _write(m, finite, residual[rows], residual_out[rows])


def at_line(matrix: Tensor) -> Tensor:
    """The matrix itself if it begins a cache line, else a copy that does."""
    return matrix if _begins_line(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def _begins_line(matrix: Tensor) -> bool:
    """Whether a matrix begins a cache line; on other devices than a CPU that does not matter."""
    return matrix.is_contiguous() and (matrix.device.type != "cpu" or matrix.data_ptr() % LINE == 0)


def _sum(g: Tensor, residual: Tensor | None, to: Tensor, *, copy: bool = False) -> Tensor:
    """g + residual, in ``to``. Without a residual, g itself if it begins a cache line and the caller does not
    write to the result (``copy``)."""
    m = to[: len(g)]
    if residual is not None:
        return torch.add(g, residual, out=m)
    return g if _begins_line(g) and not copy else m.copy_(g)


def _write(m: Tensor, finite: Tensor, residual: Tensor, residual_out: Tensor) -> None:
    """Write the new residual m to residual_out, unless that is m itself. The old residual stays if m is not
    finite, or ``finite`` is False."""
    on_cpu = m.device.type == "cpu"  # elsewhere, the check would synchronise and cost more than it saves
    if not (on_cpu and m.sum().isfinite() and finite.all()):
        residual_out.copy_(torch.where(m.isfinite() & finite, m, residual))
    elif m.data_ptr() != residual_out.data_ptr():
        residual_out.copy_(m)


def expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    total, term = _buffer(out, TERMS), _buffer(out, TERMS)
    step, rows = len(total), q.unbind()
    parts = zip(*(torch.split(row, step) for row in p.unsqueeze(2).unbind()), strict=True)
    for to, columns in zip(torch.split(out, step), parts, strict=True):
        total, term = total[: len(to)], term[: len(to)]  # the last run is shorter
        torch.mul(columns[0], rows[0], out=total if len(rows) > 1 else to)
        for k in range(1, len(rows)):
            # addmm and addcmul would round once where this rounds twice
            torch.mul(columns[k], rows[k], out=term)
            torch.add(total, term, out=total if k < len(rows) - 1 else to)


def _runs(matrix: Tensor, elements: int = RUN) -> Iterator[slice]:
    count, size = matrix.shape
    step = max(1, elements // max(1, size))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def _buffer(matrix: Tensor, elements: int = RUN) -> Tensor:
    """Memory for one run of rows."""
    count, size = matrix.shape
    return matrix.new_empty(min(count, max(1, elements // max(1, size))), size)
