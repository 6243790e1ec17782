"""A random rotation of each block: it spreads a few large elements over all (Suresh et al., 2017)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.counter import Keys, draws


def signs(block: int, keys: Keys, device: torch.device) -> Tensor:
    """One sign for each position in a block: the same for all blocks, so that chunks are independent."""
    other = keys[1], keys[0]  # the noise of stochastic rounding is drawn by the same indices
    return 1.0 - 2.0 * (draws(0, block, other, device) >> 31).to(torch.float32)


def hadamard(rows: Tensor) -> Tensor:
    """The normalised Walsh-Hadamard transform of each row; its own inverse. Widest butterflies first."""
    count, block = rows.shape
    half = block // 2
    while half:
        pairs = rows.reshape(count, -1, 2, half)
        rows = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
        half //= 2
    return rows.reshape(count, block) * float(torch.tensor(1.0 / math.sqrt(block), dtype=torch.float32))


def rotated(rows: Tensor, keys: Keys) -> Tensor:
    return hadamard(rows * signs(rows.shape[1], keys, rows.device))


def rotated_back(rows: Tensor, keys: Keys) -> Tensor:
    return hadamard(rows).mul_(signs(rows.shape[1], keys, rows.device))
