"""Weights of ranks on a device, whose numbers the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.streams import has_streams
from .weights import ROUNDING


def shares_on_device(weights: Tensor, max_share: float | None = None) -> Tensor:
    """``shares`` of fp64 weights, without a question of the host; NaN where all weights are 0."""
    if max_share is not None:
        weights = torch.minimum(weights, _level(weights, max_share))
    return weights / weights.sum()


def _level(weights: Tensor, max_share: float) -> Tensor:
    """Of all numbers of weights that may be cut, the first one that fits. Where too few ranks have a weight
    none does, and the last one, which cuts all of them alike, is right."""
    ordered = weights.sort(descending=True).values
    positive = (ordered > 0).sum().clamp(min=1)
    cut = torch.arange(len(weights), dtype=torch.float64, device=weights.device)
    full = cut * max_share >= 1 - ROUNDING  # at any level these have no more than their share
    rest = ordered.flip(0).cumsum(0).flip(0)
    levels = torch.where(full, ordered.roll(1), max_share * rest / (1 - cut * max_share))
    fits = (ordered <= levels) | (cut == positive - 1)
    return levels.gather(0, fits.to(torch.int32).argmax().view(1))


class LastTotal:
    """The sum of all weights in the last step. On a device it is copied to the host when it is computed, and
    read in the next step: the host has waited for the end of this one by then."""

    def __init__(self) -> None:
        self._step = -1
        self._copy: Tensor | None = None

    def keep(self, total: Tensor, step: int) -> None:
        if not has_streams(total.device):
            return
        if self._copy is None:
            self._copy = torch.ones((), dtype=torch.float64, pin_memory=True)
        self._step = step
        self._copy.copy_(total.double(), non_blocking=True)

    def take_step_without_weights(self, step: int) -> int | None:
        """The number of an earlier step in which no rank counted, once."""
        if self._copy is None or not 0 <= self._step < step or self._copy.item() > 0:
            return None
        found, self._step = self._step, -1
        return found
