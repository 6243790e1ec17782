"""The passes of low rank over a matrix in Triton, one kernel each. False: nothing was done.

``expand`` has the bits of plain torch, which are those of a CPU. The other two may differ in their last bits
from device to device, as ``products`` allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import triton_launch, triton_state
from .triton_check import equal_bits

NAME = "low-rank products"
MOST_RANKS = 16  # beyond, a BLAS is faster
ROWS, WIDTH = 8, 256  # of the tile of a program
CLOSE = 1e-5  # of the sum of absolute products
RESIDUALS = (torch.float32, torch.bfloat16)


def sum_rows(g: Tensor, residual: Tensor, q: Tensor, p: Tensor, total: Tensor) -> bool:
    """``total`` = g + residual, in g itself if that is ``total``; p = q total^T."""
    return _is_ours(g, p, residual) and triton_state.attempt(
        NAME, g.device, lambda: _launch_sum_rows(g, residual, q, p, total)
    )


def subtract(m: Tensor, p: Tensor, q: Tensor, residual: Tensor, residual_out: Tensor) -> bool:
    """``residual_out`` = m - p^T q, rounded once to its dtype, or the old residual where that is not finite.
    It may be ``residual`` or m."""
    return _is_ours(m, p, residual) and triton_state.attempt(
        NAME, m.device, lambda: _launch_subtract(m, p, q, residual, residual_out)
    )


def expand(p: Tensor, q: Tensor, out: Tensor) -> bool:
    """out = p^T q, one rank after the other; every step is rounded to fp32."""
    return _is_ours(out, p) and triton_state.attempt(NAME, out.device, lambda: _launch_expand(p, q, out))


def prepare(device: torch.device) -> bool:
    """Whether they may run there: checked once, where the host may wait for the answer."""
    return triton_state.trusts(NAME, device, lambda: bool(torch.stack(_check(device)).all()))


def _is_ours(matrix: Tensor, p: Tensor, residual: Tensor | None = None) -> bool:
    """Whether a kernel may do it: fp32, torch's own tensors, and not more ranks than it was made for."""
    fits = type(matrix) is Tensor and matrix.dtype == torch.float32 and 0 < len(p) <= MOST_RANKS
    if not fits or not matrix.numel() or (residual is not None and residual.dtype not in RESIDUALS):
        return False
    return prepare(matrix.device)


def _tiles(matrix: Tensor) -> int:
    rows, columns = matrix.shape
    return -(-rows // ROWS) * -(-columns // WIDTH)


def _launch_sum_rows(g: Tensor, residual: Tensor, q: Tensor, p: Tensor, total: Tensor) -> None:
    rank = len(p)
    triton_launch.launch(
        triton_state.kernels().lowrank.sum_rows, -(-len(g) // ROWS),
        g, residual, total, q, p, *g.shape, RANK=rank, PADDED=1 << (rank - 1).bit_length(), ROWS=ROWS,
        WIDTH=WIDTH, reads=(g, residual, q), writes=(total, p),
    )  # fmt: skip


def _launch_subtract(m: Tensor, p: Tensor, q: Tensor, residual: Tensor, residual_out: Tensor) -> None:
    triton_launch.launch(
        triton_state.kernels().lowrank.subtract, _tiles(m),
        m, p, q, residual, residual_out, *m.shape, RANK=len(p), ROWS=ROWS, WIDTH=WIDTH,
        reads=(m, p, q), writes=(residual_out,), rarely=(residual,),
    )  # fmt: skip


def _launch_expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    triton_launch.launch(
        triton_state.kernels().lowrank.expand, _tiles(out),
        p, q, out, *out.shape, RANK=len(p), ROWS=ROWS, WIDTH=WIDTH, reads=(p, q), writes=(out,),
    )  # fmt: skip


def _check(device: torch.device) -> list[Tensor]:
    flags = []
    for rows, columns, rank in ((37, 300, 4), (9, 513, 1), (70, 41, 3)):
        g, residual, p, q = (part.to(device) for part in odd_matrix(rows, columns, rank))
        own, plain, total = torch.empty_like(g), torch.empty_like(g), torch.empty_like(g)
        _launch_expand(p, q, own)
        plain.copy_(p[0].unsqueeze(1) * q[0])
        for column, row in zip(p[1:], q[1:], strict=True):
            plain.add_(column.unsqueeze(1) * row)
        found = torch.empty_like(p)
        _launch_sum_rows(g, residual, q, found, total)
        m = g + residual
        flags += [equal_bits(own, plain), equal_bits(total, m), _close(found, q, m)]
        for dtype in (torch.float32, torch.bfloat16):
            before, after = residual.to(dtype), torch.empty_like(residual, dtype=dtype)
            _launch_subtract(m, p, q, before, after)
            left = (m - plain).to(dtype)
            flags.append(equal_bits(after, torch.where(left.isfinite(), left, before)))
    return flags


def _close(found: Tensor, q: Tensor, m: Tensor) -> Tensor:
    """Sums in any order; one that is not finite is so in every order, or not known."""
    wide, factor = m.double(), q.double()
    size = factor.abs() @ wide.abs().t()
    near = (found.double() - factor @ wide.t()).abs() <= CLOSE * size
    return (near | (size >= torch.finfo(torch.float32).max) | size.isnan()).all() & (
        (size < torch.inf) | ~found.isfinite()
    ).all()


def odd_matrix(rows: int, columns: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A gradient, a residual and two factors, on the CPU: with zeros, denormals, numbers that overflow, and a
    row and a column that are not finite."""
    generator = torch.Generator().manual_seed(columns)
    g, residual = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    p, q = (torch.randn(rank, size, generator=generator) for size in (rows, columns))
    g[0], residual[0], p[:, 0] = 0.0, -0.0, 0.0
    g[1] *= 1e-41
    p[:, 1] *= 1e-41
    g[2], p[0, 2] = 3e38, -3e38
    g[3, 3], g[4, 4] = torch.nan, torch.inf
    q[0, 5] = torch.inf
    return g, residual, p, q
