"""Products of a gradient matrix with the thin factors of low-rank compression.

A gradient matrix g is [a, b]. A factor has one row for each rank, p [r, a] and q [r, b], so that every
product reads memory in order. ``residual`` has the shape of g: what error feedback still has to send. m is
g + residual. All tensors are contiguous, and all fp32 or all fp64. Compiled kernels compute fp32 on the CPU,
plain torch everything else; on meta tensors nothing is computed.

``expand`` and ``orthonormalise`` give the same bits on all CPUs, and the same bits on all devices of a kind,
because every worker applies them to the same numbers and must get the same result. The two projections may
differ in their last bits: an all-reduce follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..core.streams import has_streams, on_device
from ..errors import InvalidValue, WrongType
from . import device_gram_schmidt, device_products, plain_gram_schmidt, plain_products
from .native import Native, native_for


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

    With ``subtract`` (q must have orthonormal rows) ``residual_out`` becomes m - p^T q; if it is None, the
    residual is updated in place. An element that would not be finite keeps its old residual; where p is not
    finite, that is its whole row. With ``keep_sum`` instead, g becomes m: the next pass reads one matrix
    less.
    """
    residual_out = _check_residual(g, residual, p, q, subtract, residual_out)
    if keep_sum and subtract:
        raise InvalidValue(
            "keep_sum=True saves work in a second pass, and subtract=True needs none; use one of them"
        )
    if g.is_meta:
        return
    kernels = _kernels(g)
    if kernels:
        kernels.project_rows(g, residual, q, p, residual_out, keep_sum and residual is not None)
    else:
        _plain(g).project_rows(g, residual, q, p, residual_out, keep_sum)


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

    With ``subtract`` (p must have orthonormal rows) ``residual_out`` becomes m - p^T q; if it is None, the
    residual is updated in place. An element that would not be finite keeps its old residual; where q is not
    finite, that is its whole column. ``summed``: g is m already, and ``residual`` is read only where a result
    is not finite.
    """
    residual_out = _check_residual(g, residual, p, q, subtract, residual_out)
    if g.is_meta:
        return
    kernels = _kernels(g)
    if kernels:
        kernels.project_columns(g, residual, p, q, residual_out, summed)
    else:
        _plain(g).project_columns(g, residual, p, q, residual_out, summed)


def expand(p: Tensor, q: Tensor, out: Tensor) -> None:
    """out = p^T q. Each element is summed in the order of the ranks, and every step is rounded to fp32."""
    check_factors(out, p, q)
    if out.is_meta:
        return
    kernels = _kernels(out)
    if kernels:
        kernels.expand(p, q, out)
    else:
        _plain(out).expand(p, q, out)


def orthonormalise(p: Tensor) -> bool:
    """Make the rows of p orthonormal in place: Gram-Schmidt in fp64, each row projected twice.

    If a row is zero, or depends on those before it, the unit vector with the shortest projection on them
    replaces it, made orthogonal to them. So the result is orthonormal for every finite p. If an element is
    not finite, p does not change and the function returns False; on a device it returns True, because the
    host does not know.
    """
    return orthonormalise_all([p])[0]


def orthonormalise_all(factors: Sequence[Tensor], *, restart: bool = False) -> list[bool]:
    """``orthonormalise`` each factor. In plain torch, several of one size cost little more than one. With
    ``restart``, one that is not finite becomes unit vectors on a device, where the result does not tell."""
    for p in factors:
        _check_one("p", p)
        ranks, size = p.shape
        if ranks > size:
            raise InvalidValue(
                f"{ranks} rows of {size} elements cannot be orthonormal; use at most {size} ranks"
            )
    indices = [i for i, p in enumerate(factors) if p.numel() and not p.is_meta]
    computed, finite = [factors[i] for i in indices], [True] * len(factors)
    late = computed and has_streams(computed[0].device)
    if late and all(map(device_gram_schmidt.computes_here, computed)):
        device_gram_schmidt.orthonormalise_all(computed, restart=restart)
        return finite
    on_cpu = all(p.device.type == "cpu" for p in computed)
    results = _orthonormalise_here(computed) if on_cpu else orthonormalise_on_cpu(computed)
    for i, result in zip(indices, results, strict=True):
        finite[i] = result
    return finite


def orthonormalise_on_cpu(factors: Sequence[Tensor]) -> list[bool]:
    """For devices that do not compute it: one copy to the CPU and back."""
    flat = torch.cat([p.reshape(-1) for p in factors]).cpu()
    results = _orthonormalise_here(_split_like(flat, factors))
    for p, computed in zip(factors, _split_like(on_device(flat, factors[0].device), factors), strict=True):
        p.copy_(computed)
    return results


def _split_like(flat: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split_with_sizes(flat, [p.numel() for p in factors])
    return [part.view_as(p) for part, p in zip(parts, factors, strict=True)]


def _orthonormalise_here(factors: Sequence[Tensor]) -> list[bool]:
    kernels = _kernels(factors[0]) if factors else None
    if kernels:
        return [kernels.orthonormalise(p) for p in factors]
    return plain_gram_schmidt.orthonormalise_all(factors)


def _plain(tensor: Tensor) -> ModuleType:
    return device_products if has_streams(tensor.device) else plain_products


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
    """Check the arguments of a projection; return where the new residual goes, or None without subtract."""
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
        raise InvalidValue("subtract=True writes a new residual; pass residual")
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
