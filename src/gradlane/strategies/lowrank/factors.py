"""Factors: how they are kept between steps, and how they lie in a message."""

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
from .partition import WHOLE_BUCKET, Matrix, Partition

SALT = 0x10F4  # of the seeds of the first factors


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
            return "does not belong to this model"
        sides = slot.shape[:1].numel(), slot.shape[1:].numel()
        if len(slot.shape) < 2 or tensor.shape[0] > min(sides) or tensor.shape[1] not in sides:
            return f"has shape {list(tensor.shape)}, which is not a factor of a {list(slot.shape)} gradient"
        return None


class Message(NamedTuple):
    """The dense part of a bucket first, if this message carries it, then one factor after the other."""

    flat: Tensor
    dense: Tensor
    factors: list[Tensor]


def new_message(
    bucket: Bucket, use: str, parts: Partition, sizes: Sequence[int], *, with_dense: bool
) -> Message:
    """A message for factors of ``sizes`` columns; in every step it is the same buffer."""
    dense = parts.dense_numel() if with_dense else 0
    numel = dense + sum(m.rank * size for m, size in zip(parts.matrices, sizes, strict=True))
    return message_in(bucket.empty(use, numel, width(bucket)), parts, sizes, dense)


def message_in(flat: Tensor, parts: Partition, sizes: Sequence[int], dense: int) -> Message:
    """A message as views into a flat tensor whose first ``dense`` elements are the dense part."""
    counts = [dense, *(m.rank * size for m, size in zip(parts.matrices, sizes, strict=True))]
    views = torch.split_with_sizes(flat, counts)
    factors = [
        view.view(m.rank, size) for view, m, size in zip(views[1:], parts.matrices, sizes, strict=True)
    ]
    return Message(flat, views[0], factors)


def width(bucket: Bucket) -> torch.dtype:
    """Factors are computed in fp32 at least: products of fp16 numbers overflow."""
    return torch.promote_types(bucket.flat.dtype, torch.float32)


def widened(bucket: Bucket) -> Tensor:
    """The gradient as wide as the factors: the bucket's own tensor where that is wide enough."""
    if bucket.flat.is_sparse:
        name = bucket.names[0]
        raise WrongType(
            f"low-rank strategies cannot carry the sparse gradient of {name!r}; give it a strategy of its "
            f"own with Route({{{name!r}: Mean()}}, otherwise=...), or use a dense embedding"
        )
    flat, wide = bucket.flat, width(bucket)
    return flat if flat.dtype == wide else bucket.empty("wide gradient", flat.numel(), wide).copy_(flat)


def narrowed_back(bucket: Bucket, flat: Tensor) -> Tensor:
    """The answer in the gradient's own width."""
    return flat if flat is bucket.flat else bucket.flat.copy_(flat)


def kept_factor(memory: Memory, bucket: Bucket, matrix: Matrix, size: int, seed: int) -> Tensor:
    """The factor of the last step, rank x ``size``, orthonormal.

    Where there is none it is drawn, the same on all ranks. Where the rank has grown since, the missing rows
    are drawn. Where width or device differ, as after a resume, it is converted.
    """
    kept = memory.get(matrix.name)
    like = (width(bucket), bucket.flat.device)
    if kept is not None and kept.shape == (matrix.rank, size) and kept.dtype == like[0]:
        return kept.to(like[1])  # after a resume it may be on the CPU; its bits do not change
    factor = drawn(bucket, matrix, size, seed)
    if kept is not None and kept.shape[1] == size:
        common = min(len(kept), matrix.rank)
        factor[:common] = kept[:common]
    orthonormalise(factor)
    return factor


def drawn(bucket: Bucket, matrix: Matrix, size: int, seed: int) -> Tensor:
    """Uniform from -1 to 1, by a seed of this matrix alone: the same in whatever bucket the matrix comes.

    It is made from whole numbers, because torch's Gaussian numbers may have other last bits on another
    processor, and all ranks must agree.
    """
    if bucket.flat.device.type == "meta":
        return torch.empty(matrix.rank, size, dtype=width(bucket), device="meta")
    alone = replace(bucket, layout=(matrix.slot,))
    keys = keys_of(alone.seed(SALT + seed, shared=True))
    bits = draws(0, matrix.rank * size, keys, bucket.flat.device).to(torch.float64)
    return bits.mul_(2.0**-31).sub_(1.0).view(matrix.rank, size).to(width(bucket))


def keep_factors(memory: Memory, factors: Sequence[tuple[Matrix, Tensor]]) -> None:
    """Keep factors for the next step, made orthonormal: so a product with one is as large as the gradient.

    A row of zeros becomes a direction of its own, so that a gradient that begins with zeros can grow. Where
    one is not finite, the factor of the last step stays; on a device, where the host does not ask, it begins
    anew.
    """
    orthonormal = [factor.clone() for _, factor in factors]
    finite = orthonormalise_all(orthonormal, restart=True)
    for (matrix, _), factor, is_finite in zip(factors, orthonormal, finite, strict=True):
        if is_finite:
            memory.put(matrix.name, memory.blank(matrix.name, factor).copy_(factor))
