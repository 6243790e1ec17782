"""The layout of a bucket, from the names and shapes of its parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.bucket import Layout, Slot


def layout_of(names: Sequence[str], parameters: Sequence[Tensor]) -> Layout:
    """One slot per parameter; a complex parameter has pairs of real numbers."""
    return Layout(
        Slot(name, torch.Size((*parameter.shape, *((2,) if parameter.is_complex() else ()))))
        for name, parameter in zip(names, parameters, strict=True)
    )
