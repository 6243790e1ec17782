"""Whether all elements of a tensor are finite, in one pass over it, or in the pass that divides it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.numbers import HUGE
from .native import native_for

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as in csrc/rows.h


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no Inf. Nothing is summed, so large numbers are no problem.

    Of a sparse tensor, the values are checked. Integers, an empty tensor and a tensor on ``meta`` are finite.
    """
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    kernels = native_for(tensor)
    if kernels is not None and tensor.dtype in DTYPES and tensor.is_contiguous():
        return kernels.all_finite(tensor, DTYPES[tensor.dtype])
    low, high = torch.aminmax(tensor.detach())  # both are NaN if one element is
    return bool(low.isfinite() & high.isfinite())


def divided(tensor: Tensor, divisor: int, limit: float = HUGE) -> bool:
    """``tensor /= divisor``; return whether all magnitudes are known to be below ``limit`` afterwards.

    The compiled kernels check that in the same pass. Without them the answer is False, that is, not known.
    """
    kernels = native_for(tensor)
    dense = tensor.dtype == torch.float32 and not tensor.is_sparse and tensor.is_contiguous()
    if kernels is not None and dense:
        return kernels.divide(tensor, divisor, limit)
    tensor.div_(divisor)
    return False
