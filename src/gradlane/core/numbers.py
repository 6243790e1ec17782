"""What counts as a number where an option is one: True and False do not; and numbers that are safe to add."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

HUGE = 1e30
"""Sums of smaller numbers over any number of ranks stay finite, and what they are times numbers up to 1."""


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_small(tensor: Tensor) -> bool:
    """All of it is finite, and below ``HUGE``."""
    if tensor.device.type != "cpu":  # meta has no numbers, and to ask another device is to wait for it
        return False
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return float(low) > -HUGE and float(high) < HUGE  # a NaN is neither
