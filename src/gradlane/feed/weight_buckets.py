"""Buckets of weights, for rounds of local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..strategies.local_steps import LocalSteps
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


def fragments_of(trained: Parameters, strategy: LocalSteps, limit: int) -> list[list[WeightBucket]]:
    """The buckets of each fragment."""
    members = strategy.dealt({name: parameter.numel() for name, parameter in trained.items()})
    return [buckets_of(trained, names, limit) for names in members]


def buckets_of(trained: Parameters, names: Sequence[str], limit: int) -> list[WeightBucket]:
    """One dtype in each, closed as soon as it holds ``limit`` bytes."""
    tensors = [trained[name].detach() for name in names]
    groups = assign_buckets(tensors, limit, [False] * len(tensors))
    return [WeightBucket([names[i] for i in group], [tensors[i] for i in group]) for group in groups]
