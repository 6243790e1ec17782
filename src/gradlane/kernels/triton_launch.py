"""Calls a kernel in Triton. All calls go through here, so that an emulated device can see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False}
"""A product and a sum must not become one instruction, which would round once instead of twice."""


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    rarely: Sequence[Tensor] = (),
    **fixed: Any,
) -> None:
    """Run ``programs`` of a kernel on the current stream of the device. ``reads`` and ``writes`` are all
    memory that it moves, a tensor in both if it does both; ``rarely`` is read and written in odd cases only.
    """
    device = reads[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **fixed, **OPTIONS)
    else:
        kernel[(programs,)](*arguments, **fixed, **OPTIONS)
