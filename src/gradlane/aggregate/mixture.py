"""What a rule about whole vectors answers: linear combinations of the ranks' rows, and what joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.streams import has_streams, on_device
from .combine import combine_into
from .rule import RowRule

BLOCK = 8192  # columns of which mixed rows stay in the cache
Buffer = Callable[[int], Tensor]
"""From a number of elements to an uninitialised fp32 tensor of that size."""


@dataclass(frozen=True)
class Mixture:
    """The answer of a rule that knows the whole gradients by their inner products only."""

    weights: Tensor
    """fp64 [m, ranks]: the rows that come out, as linear combinations of the ranks'."""
    then: RowRule | None = None
    """What makes one of them, element by element; None where m is 1."""

    def applied(self, rows: Tensor) -> Tensor:
        """From fp32 rows [ranks, n] to [n]."""
        out = rows.new_empty(rows.shape[1])
        self.write(rows, out, lambda numel: rows.new_empty(numel))
        return out

    def write(self, rows: Tensor, out: Tensor, buffer: Buffer) -> None:
        """The same, into ``out``."""
        weights = on_device(self.weights.to(rows.dtype), rows.device)
        if self.then is None:
            torch.mv(rows.t(), weights[0], out=out)
            return
        count, size = len(weights), len(out) if has_streams(rows.device) else BLOCK
        mixed = buffer(count * min(size, len(out)))
        for start in range(0, len(out), size):
            block = rows[:, start : start + size]
            width = block.shape[1]
            mix = torch.mm(weights, block, out=mixed[: count * width].view(count, width))
            combine_into(self.then, mix, out[start : start + width])
