"""A residual of another width than the gradient's: added to it, and left again, without a wide copy of it.

Error feedback may keep the residual in bfloat16, where a full copy of the gradients does not fit. It is
widened and rounded in small runs. Compiled kernels do the work for fp32 gradients on the CPU, plain torch
elsewhere; on meta tensors nothing is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidValue
from .finite import all_finite
from .native import native_for
from .plain_products import at_line
from .products import check_factors

RUN = 131_072  # elements that plain torch works on at once


def add_residual(flat: Tensor, residual: Tensor) -> None:
    """``flat += residual``, in the width of ``flat``."""
    if flat.shape != residual.shape or not flat.is_contiguous() or not residual.is_contiguous():
        raise InvalidValue(
            f"a residual of {tuple(residual.shape)} cannot be added to a gradient of {tuple(flat.shape)}; "
            f"both must "
            "be contiguous and of one shape"
        )
    if flat.is_meta:
        return
    kernels = native_for(flat)
    if kernels and (flat.dtype, residual.dtype) == (torch.float32, torch.bfloat16):
        kernels.add_residual(flat, residual)
        return
    for start in range(0, flat.numel(), RUN):
        flat.view(-1)[start : start + RUN] += residual.view(-1)[start : start + RUN]


def subtract_product(m: Tensor, p: Tensor, q: Tensor, residual: Tensor, residual_out: Tensor) -> None:
    """``residual_out = m - p^T q``, rounded once to its width; ``residual_out`` may be ``residual`` itself.

    What was residual stays where that is not finite, or too large for the width.
    """
    check_factors(m, p, q)
    for name, tensor in (("residual", residual), ("residual_out", residual_out)):
        if tensor.shape != m.shape or tensor.dtype != residual.dtype or not tensor.is_contiguous():
            raise InvalidValue(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, its matrix {tuple(m.shape)}; residual "
                f"and residual_out "
                "must be contiguous, of that shape and of one dtype"
            )
    if m.is_meta:
        return
    kernels = native_for(m)
    if kernels and (m.dtype, residual.dtype) == (torch.float32, torch.bfloat16):
        kernels.subtract_product(m, p, q, residual, residual_out)
        return
    step, q = max(1, RUN // max(1, m.shape[1])), at_line(q)
    for start in range(0, len(m), step):
        rows = slice(start, start + step)
        narrow = torch.addmm(m[rows], at_line(p[:, rows]).t(), q, alpha=-1).to(residual.dtype)
        if not all_finite(narrow):
            narrow = torch.where(narrow.isfinite(), narrow, residual[rows])
        residual_out[rows] = narrow
