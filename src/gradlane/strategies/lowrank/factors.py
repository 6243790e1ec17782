"""Factors: where they are kept between steps, and how they lie in a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.bucket import Bucket
from ...core.memory import Memory
from ...core.world_change import Slots
from ...errors import WrongType
from ...kernels.counter import draws, keys_of
from ...kernels.products import orthonormalise, orthonormalise_all
from .matrices import WHOLE_BUCKET, Cut, Matrix, slot_of

SALT = 0x10F4  # of the first factors


class FactorMemory(Memory):
    """Factors by matrix, rank x rows or rank x columns: the same on all ranks."""

    def __init__(self) -> None:
        super().__init__(shared=True)

    def _misfit(self, name: str, tensor: Tensor, slots: Slots) -> str | None:
        if tensor.dim() != 2:
            return f"has {tensor.dim()} dimensions; a factor has two"
        if name.startswith(WHOLE_BUCKET):
            return None
        slot = slots.get(name)
        if slot is None:
            return "is no parameter of this model"
        sides = slot.shape[:1].numel(), slot.shape[1:].numel()
        if len(slot.shape) < 2 or tensor.shape[0] > min(sides) or tensor.shape[1] not in sides:
            return f"has shape {list(tensor.shape)}, which is no factor of a {list(slot.shape)} gradient"
        return None


class Message(NamedTuple):
    """The rest of a bucket in front, if it rides along, then one factor after the other."""

    flat: Tensor
    rest: Tensor
    factors: list[Tensor]


def message_for(bucket: Bucket, use: str, cut: Cut, sizes: Sequence[int], *, rest: bool) -> Message:
    """Room for factors of ``sizes`` columns, the same buffer in every step."""
    ahead = cut.rest_numel() if rest else 0
    numel = ahead + sum(m.rank * size for m, size in zip(cut.matrices, sizes, strict=True))
    return message_in(bucket.empty(use, numel, width(bucket)), cut, sizes, ahead)


def message_in(flat: Tensor, cut: Cut, sizes: Sequence[int], ahead: int) -> Message:
    counts = [ahead, *(m.rank * size for m, size in zip(cut.matrices, sizes, strict=True))]
    parts = torch.split_with_sizes(flat, counts)
    shaped = [part.view(m.rank, size) for part, m, size in zip(parts[1:], cut.matrices, sizes, strict=True)]
    return Message(flat, parts[0], shaped)


def width(bucket: Bucket) -> torch.dtype:
    """Factors are computed in fp32 at least: products of fp16 numbers overflow."""
    return torch.promote_types(bucket.flat.dtype, torch.float32)


def widened(bucket: Bucket) -> Tensor:
    """The gradient as wide as the factors: the bucket's own where it is wide enough."""
    if bucket.flat.is_sparse:
        name = bucket.names[0]
        raise WrongType(
            f"the sparse gradient of {name!r} has no low rank to find; give it a strategy of its own with "
            f"Route({{{name!r}: Mean()}}, otherwise=...), or use a dense embedding"
        )
    flat, wide = bucket.flat, width(bucket)
    return flat if flat.dtype == wide else bucket.empty("wide gradient", flat.numel(), wide).copy_(flat)


def narrowed_back(bucket: Bucket, flat: Tensor) -> Tensor:
    """The answer in the gradient's own width."""
    return flat if flat is bucket.flat else bucket.flat.copy_(flat)


def kept_factor(memory: Memory, bucket: Bucket, matrix: Matrix, size: int, seed: int) -> Tensor:
    """The factor of the last step, rank x ``size``, orthonormal; drawn anew, alike on all ranks, where
    there is none. Where the rank has grown since, rows are drawn to it; where the width or the device is
    another, as after a resume, it is converted."""
    kept = memory.get(matrix.name)
    like = (width(bucket), bucket.flat.device)
    if kept is not None and kept.shape == (matrix.rank, size) and (kept.dtype, kept.device) == like:
        return kept
    fresh = drawn(bucket, matrix, size, seed)
    if kept is not None and kept.shape[1] == size:
        both = min(len(kept), matrix.rank)
        fresh[:both] = kept[:both]
    orthonormalise(fresh)
    return fresh


def drawn(bucket: Bucket, matrix: Matrix, size: int, seed: int) -> Tensor:
    """Evenly from -1 to 1, by a seed of this matrix alone: the same in whatever bucket it comes. From whole
    numbers: torch's Gaussian ones may have other last bits on another processor, and all ranks must agree."""
    if bucket.flat.device.type == "meta":
        return torch.empty(matrix.rank, size, dtype=width(bucket), device="meta")
    alone = replace(bucket, layout=(slot_of(matrix),))
    keys = keys_of(alone.seed(SALT + seed, shared=True))
    bits = draws(0, matrix.rank * size, keys, bucket.flat.device).to(torch.float64)
    return bits.mul_(2.0**-31).sub_(1.0).view(matrix.rank, size).to(width(bucket))


def keep_factors(memory: Memory, factors: Sequence[tuple[Matrix, Tensor]]) -> None:
    """For the next step, orthonormal: so a product with one is as large as the gradient, never its square.

    A row without content becomes a direction of its own, so that what begins with zeros can grow.
    """
    kept = [memory.blank(matrix.name, factor).copy_(factor) for matrix, factor in factors]
    orthonormalise_all(kept)
    for (matrix, _), factor in zip(factors, kept, strict=True):
        memory.put(matrix.name, factor)
