"""One pass over a gradient on a device, in Triton or in the passes of plain torch: no wait of the host."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from . import triton_launch, triton_state
from .triton_check import equal_bits

HUGE, OVERFLOW = "dropping of huge residuals", "counting of overflow"
ELEMENTS = 4096  # of one program
RESIDUALS = (torch.float32, torch.bfloat16)
NARROW = (torch.float16, torch.bfloat16)
ODD = (0.0, -0.0, 1e17, -3e38, 2e18, torch.inf, torch.nan, 1e-42, 7e4)


def drop_huge(residual: Tensor, square: Tensor, limit: float) -> None:
    """Set elements of a magnitude above ``limit`` to 0 if ``square`` is not finite."""
    usable = residual.dtype in RESIDUALS and _is_flat(residual) and _trusts(HUGE, residual.device)
    if not usable or not triton_state.attempt(
        HUGE, residual.device, lambda: _launch_huge(residual, square, limit)
    ):
        _plain_huge(residual, square, limit)


def count_overflow(wide: Tensor, narrow: Tensor) -> Tensor:
    """How many finite values of ``wide`` are infinite in ``narrow``."""
    types = wide.dtype == torch.float32 and narrow.dtype in NARROW
    count = None
    if types and _is_flat(wide) and _is_flat(narrow) and _trusts(OVERFLOW, wide.device):
        count = torch.zeros((), dtype=torch.int32, device=wide.device)
        found = count
        if not triton_state.attempt(OVERFLOW, wide.device, lambda: _launch_overflow(wide, narrow, found)):
            count = None
    return _plain_overflow(wide, narrow) if count is None else count


def prepare(device: torch.device) -> None:
    """Check both kernels now, where the host may wait for the answer."""
    for name in _CHECKS:
        _trusts(name, device)


def _is_flat(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_contiguous() and tensor.numel() > 0


def _trusts(name: str, device: torch.device) -> bool:
    return triton_state.trusts(name, device, lambda: bool(torch.stack(_CHECKS[name](device)).all()))


def _plain_huge(residual: Tensor, square: Tensor, limit: float) -> None:
    most = torch.where(square.isfinite(), torch.inf, limit)
    residual.masked_fill_(residual.abs() > most, 0.0)


def _plain_overflow(wide: Tensor, narrow: Tensor) -> Tensor:
    return (torch.isinf(narrow) & torch.isfinite(wide)).sum()


def _launch_huge(residual: Tensor, square: Tensor, limit: float) -> None:
    most = float(torch.tensor(limit, dtype=residual.dtype))  # as torch compares a tensor with a number
    triton_launch.launch(
        triton_state.kernels().elementwise.drop_huge, -(-residual.numel() // ELEMENTS),
        residual, square, residual.numel(), most, ELEMENTS=ELEMENTS,
        reads=(square,), writes=(), rarely=(residual,),
    )  # fmt: skip


def _launch_overflow(wide: Tensor, narrow: Tensor, count: Tensor) -> None:
    triton_launch.launch(
        triton_state.kernels().elementwise.count_overflow, -(-wide.numel() // ELEMENTS),
        wide, narrow, count, wide.numel(), ELEMENTS=ELEMENTS, reads=(narrow,), writes=(count,),
        rarely=(wide,),
    )  # fmt: skip


def _check_huge(device: torch.device) -> list[Tensor]:
    flags, numbers = [], torch.tensor(ODD).repeat(700)[:-3]
    for square, dtype in itertools.product((1.0, torch.inf, torch.nan), RESIDUALS):
        own, other, known = (
            numbers.to(device, dtype),
            numbers.to(device, dtype),
            torch.tensor(square).to(device),
        )
        _launch_huge(own, known, 1e18)
        _plain_huge(other, known, 1e18)
        flags.append(equal_bits(own, other))
    return flags


def _check_overflow(device: torch.device) -> list[Tensor]:
    flags, wide = [], torch.tensor(ODD).repeat(700)[:-3].to(device)
    for dtype in NARROW:
        narrow, own = wide.to(dtype), torch.zeros((), dtype=torch.int32, device=device)
        _launch_overflow(wide, narrow, own)
        flags.append(own == _plain_overflow(wide, narrow))
    return flags


_CHECKS = {HUGE: _check_huge, OVERFLOW: _check_overflow}
