"""Buckets of weights, for rounds of local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..torch_internals import assign_buckets, copy_each
from .layout import layout_of

Parameters = Mapping[str, nn.Parameter]


class WeightBucket:
    """Some parameters of one dtype, and the buffer in which a copy of their weights travels."""

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.names = tuple(names)
        self.layout = layout_of(names, parameters)
        shapes = [parameter.shape for parameter in parameters]  # keeps no parameter
        sizes = [shape.numel() for shape in shapes]
        self._flat = parameters[0].new_zeros(sum(sizes), requires_grad=False)
        parts = torch.split(self._flat, sizes)
        self._parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def filled(self, parameters: Parameters) -> Tensor:
        copy_each(self._parts, [parameters[name].detach() for name in self.names])
        return self._flat


def fragments_of(trained: Parameters, count: int, limit: int) -> list[list[WeightBucket]]:
    """The buckets of each fragment. The largest parameters are dealt out first, each to the fragment that is
    smallest so far, so that fragments are of like size; within one, the order is the model's."""
    members: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(trained, key=lambda name: -trained[name].numel()):
        smallest = sizes.index(min(sizes))
        members[smallest].append(name)
        sizes[smallest] += trained[name].numel()
    place = {name: number for number, name in enumerate(trained)}
    return [buckets_of(trained, sorted(names, key=place.__getitem__), limit) for names in members]


def buckets_of(trained: Parameters, names: Sequence[str], limit: int) -> list[WeightBucket]:
    """One dtype in each, closed as soon as it holds ``limit`` bytes."""
    tensors = [trained[name].detach() for name in names]
    groups = assign_buckets(tensors, limit, [False] * len(tensors))
    return [WeightBucket([names[i] for i in group], [tensors[i] for i in group]) for group in groups]
