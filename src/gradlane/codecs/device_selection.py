"""Top-k on a device: the selection of ``PlainSearch``, bit for bit, without a wait of the host.

How many elements reach a threshold is known on the device only, so every tensor has the size of the slots.
Positions come from a search in the running count of elements that reach it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .selection import INFINITE, NO_SIGN, SPAN

INT32 = 2**30
NOTHING = -0.0  # to add it changes no bit of any number


def select(
    total: Tensor, sample: tuple[int, int, int] | None, start: int, subtract: bool,
    values: Tensor, indices: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Take the largest elements of ``total``, and ``subtract`` them from it.

    ``sample`` is the offset, the stride and the rank by which the threshold is estimated; without it, or if
    the estimate misses by more than a factor of two, the threshold is exact. It is at least 1: zeros do not
    count. kthvalue has no deterministic version on CUDA.
    """
    numel, slots = total.numel(), values.numel()
    magnitudes = total.view(torch.int32) & NO_SIGN
    largest = magnitudes.topk(slots, sorted=False).values
    threshold, most = largest.amin().clamp(min=1), largest.amax()
    if sample is not None:
        offset, stride, rank = sample
        sampled = magnitudes[offset::stride].contiguous()
        estimate = sampled.topk(rank, sorted=False).values.amin().clamp(min=1)
        found = (magnitudes >= estimate).sum()
        misses = (found > 2 * slots) | ((2 * found < slots) & (estimate > 1))
        threshold = torch.where(misses, threshold, estimate)
    count = torch.int32 if numel < INT32 else torch.int64  # it is added to itself below
    running = (magnitudes >= threshold).cumsum(0, dtype=count)
    positions, valid = _positions(running, start, slots)
    taken = total[positions.clamp(max=numel - 1)]
    rounded = taken.to(values.dtype)
    if rounded.dtype != taken.dtype:
        rounded.masked_fill_(taken.isnan(), torch.nan)
    values.copy_(torch.where(valid, rounded, 0.0))
    indices.copy_(torch.where(valid, positions & 0xFFFF, 0))
    _count(positions, numel, counts)
    if subtract:
        lost = torch.where(valid, -rounded.to(torch.float32), NOTHING)
        total.index_add_(0, positions.clamp(max=numel - 1), lost)
    values[:1].masked_fill_(most >= INFINITE, torch.nan)


def scatter(values: Tensor, indices: Tensor, counts: Tensor, into: Tensor, factor: float) -> None:
    """``into += values * factor`` at the positions of the values."""
    slots = torch.arange(values.numel(), device=into.device)
    spans = torch.searchsorted(counts.cumsum(0), slots, right=True)
    valid = spans < counts.numel()
    positions = spans.clamp(max=counts.numel() - 1) * SPAN + (indices.to(torch.int64) & 0xFFFF)
    into.index_add_(0, positions, torch.where(valid, values.to(torch.float32) * factor, NOTHING))


def _positions(running: Tensor, start: int, slots: int) -> tuple[Tensor, Tensor]:
    """Where the first elements are from ``start`` on, wrapping around at the end, in ascending order; and
    which of the slots have one. ``running`` counts the elements up to each position."""
    found = running[-1]
    before = running[start - 1] if start else torch.zeros_like(found)
    order = torch.arange(slots, device=running.device, dtype=running.dtype)
    positions = torch.searchsorted(running, (before + order) % found.clamp(min=1) + 1)
    positions = torch.where(order < found, positions, running.numel()).sort().values
    return positions, positions < running.numel()


def _count(positions: Tensor, numel: int, counts: Tensor) -> None:
    """How many positions are in each span; empty slots have the position ``numel``."""
    ends = torch.arange(0, (counts.numel() + 1) * SPAN, SPAN, device=positions.device).clamp_(max=numel)
    counts.copy_(torch.searchsorted(positions, ends).diff())
