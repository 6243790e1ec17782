"""Products of a gradient matrix with the thin factors of low-rank compression.

A matrix g is [a, b]; a factor has one row for each rank, p [r, a] and q [r, b], so that every product runs
along memory. ``residual`` is of the shape of g: what error feedback still has to send; m = g + residual.
All are
fp32, or all fp64, and contiguous. Compiled kernels do the work for fp32 on the CPU, plain torch elsewhere;
on meta tensors nothing is done.

``expand``, ``orthonormalise`` and ``row_squares`` give the same bits wherever they run, because every rank
applies them to what all have agreed on. The two projections may differ in their last bits: an all-reduce
follows them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InvalidValue, WrongType
from . import plain_gram_schmidt, plain_products
from .calls import Native
from .native import native_for


def project_rows(
    g: Tensor,
    residual: Tensor | None,
    q: Tensor,
    p: Tensor,
    *,
    subtract: bool = False,
    residual_out: Tensor | None = None,
    keep_sum: bool = False,
) -> None:
    """p[k, i] = sum over j of m[i, j] q[k, j].

    With ``subtract`` (q must have orthonormal rows) ``residual_out`` becomes m - p^T q, what p leaves out;
    where it is
    not given, that is residual itself. An element that would not be finite stays as it was residual; where
    p is not
    finite, that is its whole row. With ``keep_sum`` instead, g becomes m: the next pass reads one matrix
    less.
    """
    residual_out = _check_residual(g, residual, p, q, subtract, residual_out)
    if keep_sum and subtract:
        raise InvalidValue("keep_sum=True is for a pass after this one; with subtract=True there is none")
    if g.is_meta:
        return
    kernels = _kernels(g)
    if kernels:
        kernels.project_rows(g, residual, q, p, residual_out, keep_sum and residual is not None)
    else:
        plain_products.project_rows(g, residual, q, p, residual_out, keep_sum)


def project_columns(
    g: Tensor,
    residual: Tensor | None,
    p: Tensor,
    q: Tensor,
    *,
    subtract: bool = False,
    residual_out: Tensor | None = None,
    summed: bool = False,
) -> None:
    """q[k, j] = sum over i of p[k, i] m[i, j].

    With ``subtract`` (p must have orthonormal rows) ``residual_out``, or residual itself, becomes m - p^T
    q. An element
    that would not be finite stays as it was residual; where q is not finite, that is its whole column.
    ``summed``: g is m already, and residual only what stays where something is not finite.
    """
    residual_out = _check_residual(g, residual, p, q, subtract, residual_out)
    if g.is_meta:
        return
    kernels = _kernels(g)
    if kernels:
        kernels.project_columns(g, residual, p, q, residual_out, summed)
    else:
        plain_products.project_columns(g, residual, p, q, residual_out, summed)


def expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    """out = p^T q, each element added up in the order of the ranks, every step rounded to fp32."""
    check_factors(out, p, q)
    if out.is_meta:
        return
    kernels = _kernels(out)
    if kernels:
        kernels.expand(p, q, out)
    else:
        plain_products.expand(p, q, out)


def orthonormalise(p: Tensor) -> bool:
    """Make the rows of p orthonormal in place: Gram-Schmidt in fp64, each row projected twice.

    A row that is zero, or depends on those before it, is replaced by the unit vector that they cover least,
    made orthogonal to them: the result is orthonormal for every finite p. If an element is not finite, p
    stays as it is and the answer is False.
    """
    return orthonormalise_all([p])[0]


def orthonormalise_all(factors: Sequence[Tensor]) -> list[bool]:
    """The same for each of them; in plain torch that costs little more than one if they are of one size."""
    for p in factors:
        _check_one("p", p)
        ranks, size = p.shape
        if ranks > size:
            raise InvalidValue(
                f"{ranks} rows of {size} elements cannot be orthonormal; use at most {size} ranks"
            )
    there = [place for place, p in enumerate(factors) if p.numel() and not p.is_meta]
    given, done = [factors[place] for place in there], [True] * len(factors)
    found = _orthonormal(given) if all(p.device.type == "cpu" for p in given) else by_way_of_the_cpu(given)
    for place, fine in zip(there, found, strict=True):
        done[place] = fine
    return done


def by_way_of_the_cpu(given: Sequence[Tensor]) -> list[bool]:
    """Factors are small, and Gram-Schmidt looks at the numbers of every row: one trip there and back instead
    of a wait for each of them, and the bits are those of every other machine."""
    there = torch.cat([p.reshape(-1) for p in given]).cpu()
    found = _orthonormal(_apart(there, given))
    for p, made in zip(given, _apart(there.to(given[0].device), given), strict=True):
        p.copy_(made)
    return found


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split_with_sizes(flat, [p.numel() for p in like])
    return [part.view_as(p) for part, p in zip(parts, like, strict=True)]


def _orthonormal(given: Sequence[Tensor]) -> list[bool]:
    kernels = _kernels(given[0]) if given else None
    if kernels:
        return [kernels.orthonormalise(p) for p in given]
    return plain_gram_schmidt.orthonormalise_all(given)


def row_squares(q: Tensor) -> Tensor:
    """The square of each row's norm, in fp64 and in a fixed order: every rank decides by it alike."""
    _check_one("q", q)
    return plain_gram_schmidt.row_squares(q)


def _kernels(tensor: Tensor) -> Native | None:
    return native_for(tensor) if tensor.dtype == torch.float32 else None


def check_factors(g: Tensor, p: Tensor, q: Tensor) -> None:
    for name, tensor in (("matrix", g), ("p", p), ("q", q)):
        _check_one(name, tensor, like=g)
    ranks = p.shape[0]
    if p.shape[1] != g.shape[0] or q.shape[1] != g.shape[1] or q.shape[0] != ranks or not ranks:
        raise InvalidValue(
            f"factors {tuple(p.shape)} and {tuple(q.shape)} do not fit a matrix {tuple(g.shape)}; "
            f"they must be [r, {g.shape[0]}] and [r, {g.shape[1]}] with the same r > 0"
        )


def _check_residual(
    g: Tensor, residual: Tensor | None, p: Tensor, q: Tensor, subtract: bool, residual_out: Tensor | None
) -> Tensor | None:
    """Where what is left goes, or None where nothing is settled."""
    check_factors(g, p, q)
    for name, tensor in (("residual", residual), ("residual_out", residual_out)):
        if tensor is not None:
            _check_one(name, tensor, like=g)
            if tensor.shape != g.shape:
                raise InvalidValue(
                    f"{name} is {tuple(tensor.shape)}, its matrix {tuple(g.shape)}; they must agree"
                )
    if not subtract:
        if residual_out is not None:
            raise InvalidValue(
                "residual_out is written with subtract=True only; pass that too, or no residual_out"
            )
        return None
    if residual is None:
        raise InvalidValue("subtract=True without residual has nothing to settle; pass residual")
    return residual if residual_out is None else residual_out


def _check_one(name: str, tensor: Tensor, like: Tensor | None = None) -> None:
    if tensor.dtype not in (torch.float32, torch.float64) or (
        like is not None and tensor.dtype != like.dtype
    ):
        beside = "" if like is None or like is tensor else f" beside {like.dtype}"
        raise WrongType(
            f"{name} is {tensor.dtype}{beside}; low-rank products take torch.float32 or torch.float64, alike"
        )
    if tensor.dim() != 2 or not tensor.is_contiguous():
        raise InvalidValue(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            "it must be a contiguous matrix"
        )
