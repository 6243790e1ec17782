"""Whether all elements of a tensor are finite, in one pass over it, or in the pass that divides it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..core.numbers import HUGE
from ..core.streams import has_streams
from ..torch_internals import sparse_values
from .native import VARIABLE, native, native_for

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as in csrc/rows.h


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no Inf. Nothing is summed, so large numbers are no problem.

    Of a sparse tensor, the values are checked. Integers, an empty tensor and a tensor on ``meta`` are finite.
    """
    if tensor.is_sparse:
        tensor = sparse_values(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    kernels = native_for(tensor)
    if kernels is not None and tensor.dtype in DTYPES and tensor.is_contiguous():
        return kernels.all_finite(tensor, DTYPES[tensor.dtype])
    low, high = torch.aminmax(tensor.detach())  # both are NaN if one element is
    return bool(low.isfinite() & high.isfinite())


def finite_flag(tensor: Tensor) -> bool | Tensor:
    """The same without waiting for a device: there the answer is a tensor without dimensions."""
    if not has_streams(tensor.device):
        return all_finite(tensor)
    if tensor.is_sparse:
        tensor = sparse_values(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())
    return low.isfinite() & high.isfinite()


def choose(flag: bool | Tensor, new: Tensor, old: Tensor, out: Tensor) -> Tensor:
    """``out`` becomes ``new`` where the flag is true, otherwise ``old``."""
    if isinstance(flag, bool):
        return out.copy_(new if flag else old)
    return out.copy_(torch.where(flag, new, old))


def divided(tensor: Tensor, divisor: int, limit: float = HUGE) -> bool:
    """``tensor /= divisor``; return whether all magnitudes are known to be below ``limit`` afterwards.

    The compiled kernel checks that in the same pass. Without it the answer is False, that is, not known.
    """
    divide = _divide(os.environ.get(VARIABLE, "")) if tensor.device.type == "cpu" else None
    dense = tensor.dtype == torch.float32 and not tensor.is_sparse and tensor.is_contiguous()
    if divide is not None and dense:
        return bool(divide(torch.get_num_threads(), tensor.data_ptr(), tensor.numel(), divisor, limit))
    tensor.div_(divisor)
    return False


@lru_cache(maxsize=16)
def _divide(choice: str) -> Callable[..., int] | None:
    """The C function for a value of the environment variable: found once, since every mean calls it."""
    kernels = native()
    return None if kernels is None else kernels.function("divide")
