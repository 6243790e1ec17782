"""What a strategy is tried on by its laws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core.strategy import Strategy, check_world
from ..errors import InvalidValue
from .after import same_bits
from .ranks import Simulation

HALF = 3  # steps before a stop; as many follow
Answers = list[dict[str, Tensor]]


@dataclass
class Case:
    """A strategy as it was given, and what it is tried on."""

    strategy: Strategy
    shapes: Mapping[str, tuple[int, ...]]
    wanted: tuple[int, ...]
    names: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    residual: Callable[[Strategy], Mapping[str, Tensor]] | None = None

    def ranks(self, world: int, bucket_bytes: int | None = None) -> Simulation:
        node = 2 if world % 2 == 0 else 1
        return Simulation(copy.deepcopy(self.strategy), world, bucket_bytes=bucket_bytes, node_size=node)

    def gradients(self, world: int, step: int) -> Answers:
        generator = torch.Generator().manual_seed(1000 * world + step)
        return [
            {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
            for _ in range(world)
        ]

    def run(self, ranks: Simulation, first: int, last: int) -> list[Answers]:
        ranks.steps = first
        return [ranks.step(self.gradients(ranks.world, step)) for step in range(first, last)]

    @cached_property
    def worlds(self) -> tuple[int, ...]:
        return tuple(world for world in self.wanted if self._possible(world))

    def _possible(self, world: int) -> bool:
        try:
            check_world(self.strategy, world)
        except InvalidValue:
            return False
        return True

    @property
    def several(self) -> int:
        """A number of ranks at which most of the code is at work; two are often another path."""
        return min((world for world in self.worlds if world > 2), default=max(self.worlds))


def first_difference(one: list[Answers], two: list[Answers], first: int = 0) -> str | None:
    for step, (left, right) in enumerate(zip(one, two, strict=True), start=first):
        for name, value in left[0].items():
            if not same_bits(value, right[0][name]):
                return f"world={len(left)}, step {step}: the answer for {name!r} is another one"
    return None
