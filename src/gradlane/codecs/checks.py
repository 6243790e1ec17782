"""What codecs accept: flat tensors, and residuals that are like the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidValue, WrongType

RESIDUAL_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def check_flat(flat: Tensor, codec: str) -> None:
    if not isinstance(flat, Tensor) or not flat.is_floating_point() or flat.is_sparse:
        got = described(flat) if isinstance(flat, Tensor) else type(flat).__name__
        raise WrongType(f"{codec} takes dense floating-point tensors, got {got}")
    if flat.dim() != 1:
        raise InvalidValue(f"{codec} takes flat tensors, got {described(flat)}; pass flat.view(-1)")


def check_residual(gradient: Tensor, residual: Tensor, residual_out: Tensor) -> None:
    if (
        residual.dtype not in RESIDUAL_DTYPES
        or residual.shape != gradient.shape
        or residual.device != gradient.device
    ):
        raise InvalidValue(
            f"residual is {described(residual)}; it must be float32, bfloat16 or float64 and otherwise like "
            f"the gradient, which is {described(gradient)}"
        )
    if (
        residual_out.dtype != residual.dtype
        or residual_out.shape != residual.shape
        or residual_out.device != residual.device
    ):
        raise InvalidValue(
            f"residual_out is {described(residual_out)}; it must be like residual, which is "
            f"{described(residual)}"
        )


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
