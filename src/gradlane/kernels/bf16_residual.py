"""Error feedback with a residual in bfloat16, to save memory: added and updated without an fp32 copy of it.

Compiled kernels compute fp32 gradients on the CPU. For other dtypes and devices, plain torch works in small
runs. On meta tensors nothing is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.streams import exact_products, has_streams
from ..errors import InvalidValue
from . import triton_lowrank
from .finite import all_finite
from .native import Native, native_for
from .plain_products import at_line
from .products import check_factors

RUN = 131_072  # elements that plain torch computes at once: they stay in the second-level cache
DEVICE_RUN = 1 << 22  # on a device, where a kernel on fewer takes as long


def add_residual(flat: Tensor, residual: Tensor) -> None:
    """``flat += residual``, computed in the dtype of ``flat``."""
    _check("residual", residual, flat, residual.dtype)
    if flat.is_meta:
        return
    if kernels := _kernels(flat, residual):
        kernels.add_residual(flat, residual)
        return
    step = _run_on(flat)
    for start in range(0, flat.numel(), step):
        flat.view(-1)[start : start + step] += residual.view(-1)[start : start + step]


def subtract_product(m: Tensor, p: Tensor, q: Tensor, residual: Tensor, residual_out: Tensor) -> None:
    """``residual_out = m - p^T q``, rounded once to its dtype; ``residual_out`` may be ``residual`` itself.

    The old residual stays where the result is not finite, or too large for the dtype.
    """
    check_factors(m, p, q)
    _check("residual", residual, m, residual.dtype)
    _check("residual_out", residual_out, m, residual.dtype)
    if m.is_meta:
        return
    if kernels := _kernels(m, residual):
        kernels.subtract_product(m, p, q, residual, residual_out)
        return
    if has_streams(m.device) and triton_lowrank.subtract(m, p, q, residual, residual_out):
        return
    step, q = max(1, _run_on(m) // max(1, m.shape[1])), at_line(q)
    for start in range(0, len(m), step):
        rows = slice(start, start + step)
        with exact_products(m.device):
            rounded = torch.addmm(m[rows], at_line(p[:, rows]).t(), q, alpha=-1).to(residual.dtype)
        if has_streams(m.device) or not all_finite(rounded):
            rounded = torch.where(rounded.isfinite(), rounded, residual[rows])
        residual_out[rows] = rounded


def _run_on(tensor: Tensor) -> int:
    return DEVICE_RUN if has_streams(tensor.device) else RUN


def _kernels(gradient: Tensor, residual: Tensor) -> Native | None:
    wanted = (torch.float32, torch.bfloat16)
    return native_for(gradient) if (gradient.dtype, residual.dtype) == wanted else None


def _check(name: str, tensor: Tensor, gradient: Tensor, dtype: torch.dtype) -> None:
    """The compiled kernels read and write through bare pointers."""
    alike = tensor.shape == gradient.shape and tensor.dtype == dtype
    if not (alike and tensor.is_contiguous() and gradient.is_contiguous()):
        raise InvalidValue(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, the gradient is "
            f"{tuple(gradient.shape)} with strides {gradient.stride()}; {name} must be {dtype}, and both "
            "must be contiguous and of one shape"
        )
