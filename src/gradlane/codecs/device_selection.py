"""Top-k on a device: the selection of ``PlainSearch``, bit for bit, without a wait of the host.

How many elements reach a threshold is known on the device only, so every tensor has the size of the slots.
Positions come from a search in the running count of elements that reach it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import triton_state, triton_topk
from ..kernels.triton_check import equal_bits, odd_input
from .base import keep_finite
from .selection import INFINITE, NO_SIGN, SPAN

Sample = tuple[int, int, int]
INT32 = 2**30
ODD: tuple[tuple[int, int, Sample | None, int, torch.dtype], ...] = (
    # elements, slots, sample, start, values
    (70_001, 700, None, 123, torch.float32),
    (70_001, 700, (3, 7, 95), 69_000, torch.float32),
    (9_000, 90, (0, 100, 90), 8_999, torch.bfloat16),  # the estimate is far too low
    (9_000, 900, (1, 100, 1), 0, torch.float32),  # and far too high
    (5_000, 5_000, None, 77, torch.bfloat16),
)
NOTHING = -0.0  # to add it changes no bit of any number


def select(
    flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, sample: Sample | None, start: int,
    values: Tensor, indices: Tensor, counts: Tensor,
) -> bool:  # fmt: skip
    """Take the largest elements of flat + residual, and leave in ``residual_out`` what is not taken. True if
    all of that is finite.

    Without ``residual`` they are taken from flat; ``residual_out`` is flat, or None: nothing is subtracted.
    ``sample`` is the offset, the stride and the rank by which the threshold is estimated; without it, or if
    the estimate misses by more than a factor of two, the threshold is exact. It is at least 1: zeros do not
    count. kthvalue has no deterministic version on CUDA.
    """
    total = flat if residual is None or residual_out is None else residual_out
    subtract, payload = residual_out is not None, (values, indices, counts)
    if triton_topk.usable(flat, values, lambda: _has_the_bits(flat.device)):
        passes = triton_topk.TopKPasses(flat, residual, total, values.numel())
        if triton_state.attempt(
            triton_topk.NAME, flat.device, lambda: passes.run(sample, start, subtract, *payload)
        ):
            return subtract
        residual = None if passes.summed else residual
    if residual is not None:
        torch.add(residual, flat, out=total)
    _select(total, sample, start, subtract, *payload)
    return False


def prepare(device: torch.device) -> None:
    """Check the kernels in Triton now, where the host may wait for the answer."""
    triton_state.trusts(triton_topk.NAME, device, lambda: _has_the_bits(device))


def _has_the_bits(device: torch.device) -> bool:
    """Small odd inputs, with both. The host waits for the device, once."""
    flags = []
    for numel, slots, sample, start, dtype in ODD:
        gradient, residual = (part.to(device) for part in odd_input(numel, 512))
        gradient[gradient.isnan()] = 0.0  # its bits may be others
        found = []
        for triton in (True, False):
            values = torch.full((slots,), 7, dtype=dtype, device=device)
            indices = torch.full((slots,), 7, dtype=torch.int16, device=device)
            counts = torch.full((-(-numel // SPAN),), 7, dtype=torch.int32, device=device)
            total = torch.empty_like(gradient)
            if triton:
                passes = triton_topk.TopKPasses(gradient, residual, total, slots)
                passes.run(sample, start, True, values, indices, counts)
            else:
                torch.add(residual, gradient, out=total)
                _select(total, sample, start, True, values, indices, counts)
                keep_finite(total)
            found.append((values, indices, counts, total))
        flags += [equal_bits(*pair) for pair in zip(*found, strict=True)]
    return bool(torch.stack(flags).all())


def _select(
    total: Tensor, sample: Sample | None, start: int, subtract: bool,
    values: Tensor, indices: Tensor, counts: Tensor,
) -> None:  # fmt: skip
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
