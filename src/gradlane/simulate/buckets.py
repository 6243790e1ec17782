"""Gradients by name, packed into buckets as DDP does it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..core.bucket import Layout, Slot
from ..errors import InvalidValue, WrongType

Shape = Iterable[int]


def slots_of(shapes: Mapping[str, Shape] | nn.Module) -> tuple[Slot, ...]:
    """The parameters of ``{name: shape}``, or those of a module that get a gradient."""
    if isinstance(shapes, nn.Module):
        pairs = ((n, p.shape) for n, p in shapes.named_parameters() if p.requires_grad)
        return tuple(Slot(name, torch.Size(shape)) for name, shape in pairs)
    if not isinstance(shapes, Mapping):
        raise WrongType(f"shapes is a {type(shapes).__name__}; give {{name: shape}} or a module")
    return tuple(
        Slot(name, torch.Size([shape] if isinstance(shape, int) else list(shape)))
        for name, shape in shapes.items()
    )


def split(slots: Iterable[tuple[Slot, torch.dtype]], bucket_bytes: int | None) -> list[Layout]:
    """Split the parameters, in their order, into buckets of one dtype and at most ``bucket_bytes``.

    A larger parameter gets a bucket of its own. None means no limit.
    """
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise InvalidValue(f"bucket_bytes={bucket_bytes} holds nothing; use a positive number or None")
    buckets: list[list[Slot]] = []
    filled, current = 0, None
    for slot, dtype in slots:
        size = slot.numel * dtype.itemsize
        full = bucket_bytes is not None and filled + size > bucket_bytes
        if not buckets or dtype != current or full:
            buckets.append([])
            filled, current = 0, dtype
        buckets[-1].append(slot)
        filled += size
    return [Layout(bucket) for bucket in buckets]


def flattened(gradients: Mapping[str, Tensor], layout: tuple[Slot, ...]) -> Tensor:
    return torch.cat([gradients[slot.name].reshape(-1) for slot in layout])


def nodes_of(world: int, node_size: int | None) -> list[range]:
    """The ranks of each node; without a node size all ranks are one node."""
    node = world if node_size is None else node_size
    if world < 1:
        raise InvalidValue(f"world={world} has no ranks; use 1 or more")
    if node < 1 or world % node:
        raise InvalidValue(f"node_size={node} does not divide world={world}; nodes must be equal")
    return [range(first, first + node) for first in range(0, world, node)]
