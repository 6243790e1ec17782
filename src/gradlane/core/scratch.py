"""Buffers that are allocated once and used again every step."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """One bucket's buffers, by use.

    To allocate a message as large as a bucket costs more than to fill it, because its pages are new every
    time. Scratch belongs to the bucket, not to the strategy: two models may share a strategy without state,
    and run it at the same time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._parts: dict[str, Scratch] = {}

    def get(self, key: tuple[object, ...], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept = self._kept.get((key, dtype, device))
        if kept is None or kept.numel() != numel:
            kept = self._kept[(key, dtype, device)] = torch.empty(numel, dtype=dtype, device=device)
        return kept

    def part(self, name: str) -> Scratch:
        """Buffers for a strategy inside another one, whose uses have the same names."""
        return self._parts.setdefault(name, Scratch())

    def buffers(self) -> list[Tensor]:
        """All buffers; the next step may overwrite them."""
        inside = [buffer for part in self._parts.values() for buffer in part.buffers()]
        return [*self._kept.values(), *inside]
