"""Checks of options that are numbers (True and False are not), and of tensors that can be summed safely."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

HUGE = 1e30
"""Values below this can be summed over any number of ranks, and scaled by factors up to 1, without
overflowing fp32."""


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_bounded(tensor: Tensor) -> bool:
    """Whether all of it is finite and smaller than ``HUGE``."""
    if tensor.device.type != "cpu":  # meta has no values, and another device would have to be waited for
        return False
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return float(low) > -HUGE and float(high) < HUGE  # both are false for NaN
