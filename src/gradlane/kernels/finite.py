"""Whether all numbers of a tensor are finite, at the speed of reading it; for nothing while it is divided."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..core.numbers import HUGE
from ..torch_internals import sparse_values
from .native import VARIABLE, native, native_for

WIDTHS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as in csrc/native.c


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no Inf in it. Nothing is added up, so large numbers do no harm.

    Of a sparse tensor its values are looked at. Whole numbers are always finite, and so are an empty tensor
    and one on ``meta``.
    """
    if tensor.is_sparse:
        tensor = sparse_values(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    library = native_for(tensor)
    if library is not None and tensor.dtype in WIDTHS and tensor.is_contiguous():
        return library.all_finite(tensor, WIDTHS[tensor.dtype])
    low, high = torch.aminmax(tensor.detach())  # a NaN is both
    return bool(low.isfinite() & high.isfinite())


def divided(tensor: Tensor, divisor: int, limit: float = HUGE) -> bool:
    """``tensor /= divisor``, and whether all of it is known to be below ``limit`` then: in the same pass
    where the kernels are compiled, else nobody knows."""
    divide = _divide(os.environ.get(VARIABLE, "")) if tensor.device.type == "cpu" else None
    if (
        divide is not None
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        and not tensor.is_sparse
    ):
        return bool(divide(torch.get_num_threads(), tensor.data_ptr(), tensor.numel(), divisor, limit))
    tensor.div_(divisor)
    return False


@lru_cache(maxsize=16)
def _divide(choice: str) -> Callable[..., int] | None:
    """The C function for a value of the variable; looked up once, since every mean calls it."""
    library = native()
    return None if library is None else library.function("divide")
