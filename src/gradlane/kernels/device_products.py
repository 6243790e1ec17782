"""The low-rank products on a device whose kernels run later: whole matrices, and no question of the host.

A matrix is read and written as a whole, since a kernel on a part of it takes about as long. ``products`` has
the contract. Masks are applied always: to ask whether one is needed the host would wait. ``triton_lowrank``
does in one pass what takes several here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.streams import exact_products
from . import triton_lowrank


def project_rows(
    g: Tensor, residual: Tensor | None, q: Tensor, p: Tensor, residual_out: Tensor | None, keep_sum: bool
) -> None:
    if residual is None:
        torch.mm(q, g.t(), out=p)
        return
    m = g if keep_sum else _room_for_sum(g, residual, residual_out)
    if not triton_lowrank.sum_rows(g, residual, q, p, m):
        torch.mm(q, torch.add(g, residual, out=m).t(), out=p)
    if residual_out is not None:
        _subtract(m, p, q, _finite_columns(p).unsqueeze(1), residual, residual_out)


def project_columns(
    g: Tensor, residual: Tensor | None, p: Tensor, q: Tensor, residual_out: Tensor | None, summed: bool
) -> None:
    m = g
    if residual is not None and not summed:
        m = torch.add(g, residual, out=_room_for_sum(g, residual, residual_out))
    torch.mm(p, m, out=q)
    if residual_out is not None and residual is not None:
        _subtract(m, p, q, _finite_columns(q), residual, residual_out)


def _room_for_sum(g: Tensor, residual: Tensor, residual_out: Tensor | None) -> Tensor:
    is_free = residual_out is not None and residual_out.data_ptr() != residual.data_ptr()
    return residual_out if is_free and residual_out is not None else torch.empty_like(g)


def _finite_columns(factor: Tensor) -> Tensor:
    return factor.abs().amax(0) < torch.inf


def _subtract(
    m: Tensor, p: Tensor, q: Tensor, finite: Tensor, residual: Tensor, residual_out: Tensor
) -> None:
    """``residual_out`` = m - p^T q where the row or the column is finite, else the old residual. Whatever is
    not finite in m makes its row of p and its column of q so, and they are much smaller."""
    if triton_lowrank.subtract(m, p, q, residual, residual_out):
        return
    is_free = residual_out.data_ptr() != residual.data_ptr()
    with exact_products(m.device):
        left = torch.addmm(m, p.t(), q, alpha=-1, out=residual_out if is_free else None)
    torch.where(finite, left, residual, out=residual_out)


def expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    """All ranks must get the same bits, so no BLAS computes it: that may choose another order on another GPU.
    ``addcmul`` may round once where this rounds twice, as a CPU does."""
    if triton_lowrank.expand(p, q, out):
        return
    rows, columns = q.unbind(), p.unsqueeze(2).unbind()
    torch.mul(columns[0], rows[0], out=out)
    for column, row in zip(columns[1:], rows[1:], strict=True):
        out.add_(column * row)
