"""What is saved, and what a checkpoint is loaded into: a strategy on a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.strategy import Strategy
from ..core.world_change import Expected, Slots

Layout = list[list[str]]
"""Names of parameters, bucket by bucket."""


class Parameter(NamedTuple):
    name: str
    shape: list[int]
    dtype: str
    trained: bool

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype} {'trained' if self.trained else 'frozen'}"


@dataclass(frozen=True)
class Subject:
    """A strategy on a model, between two steps."""

    strategy: Strategy
    text: str
    step: int
    parameters: Sequence[Parameter]
    layout: Layout
    """The current one; empty before the first step."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """What this rank has counted until now, for the metrics of a run that goes on."""

    def largest_file(self) -> int:
        """Bytes that a rank may have to write, at most: four copies of the gradient in fp32."""
        return 16 * sum(math.prod(parameter.shape) for parameter in self.parameters)


def parameters_of(module: nn.Module) -> list[Parameter]:
    return [
        Parameter(name, list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for name, p in module.named_parameters()
    ]


def slots_of(parameters: Sequence[Parameter]) -> Slots:
    """The shapes and dtypes that memories expect: a complex parameter is seen as real pairs."""
    return dict(_slots(parameters))


def _slots(parameters: Sequence[Parameter]) -> Iterator[tuple[str, Expected]]:
    for name, shape, dtype, trained in parameters:
        kind = getattr(torch, dtype, None)
        if trained and isinstance(kind, torch.dtype):
            pair = (2,) if kind.is_complex else ()
            yield name, Expected(torch.Size((*shape, *pair)), kind.to_real())


def as_layout(value: object) -> Layout:
    """``value``, checked: lists of names, each once."""
    names: list[Any] = []
    if isinstance(value, list) and all(isinstance(bucket, list) for bucket in value):
        names = [name for bucket in value for name in bucket]
        if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
            return value
    raise ValueError("the layout is not a list of lists of names, each once")
