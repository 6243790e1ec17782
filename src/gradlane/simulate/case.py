"""What the laws run a strategy on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core.strategy import Strategy, parts
from ..core.world_change import Expected, Slots
from ..errors import InvalidValue
from .after import same_bits
from .ranks import Simulation

HALF = 3  # steps before a stop, and after it
Tensors = list[dict[str, Tensor]]
"""By name, for each rank."""


@dataclass
class Case:
    """The strategy that is checked, and what it runs on."""

    strategy: Strategy
    shapes: Mapping[str, tuple[int, ...]]
    wanted: tuple[int, ...]
    names: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    residual: Callable[[Strategy], Mapping[str, Tensor]] | None = None
    decayed: Callable[[Strategy], Mapping[str, Tensor]] | None = None
    """What the last step has taken off the residual of one rank, on purpose."""

    def ranks(self, world: int, bucket_bytes: int | None = None) -> Simulation:
        node = 2 if world % 2 == 0 and world > 2 else 1  # several nodes
        ranks = Simulation(copy.deepcopy(self.strategy), world, bucket_bytes=bucket_bytes, node_size=node)
        for own, scopes in zip(ranks.strategies, ranks.scopes, strict=True):
            own.enter(scopes, self.slots)
        return ranks

    @property
    def slots(self) -> Slots:
        return {name: Expected(torch.Size(shape), torch.float32) for name, shape in self.shapes.items()}

    def gradients(self, world: int, step: int) -> Tensors:
        generator = torch.Generator().manual_seed(1000 * world + step)
        return [
            {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
            for _ in range(world)
        ]

    def run(self, ranks: Simulation, first: int, last: int) -> list[Tensors]:
        ranks.steps = first
        return [ranks.step(self.gradients(ranks.world, step)) for step in range(first, last)]

    @cached_property
    def worlds(self) -> tuple[int, ...]:
        return tuple(world for world in self.wanted if self._possible(world))

    def _possible(self, world: int) -> bool:
        try:
            self.ranks(world)
        except InvalidValue:
            return False
        return True

    @property
    def several(self) -> int:
        """A number of ranks above 2, if possible: with two ranks many strategies take another path. With
        three there is one in each node."""
        least = 4 if any(part.uses_nodes for part in parts(self.strategy)) else 3
        return min((world for world in self.worlds if world >= least), default=max(self.worlds))


def first_difference(one: list[Tensors], two: list[Tensors], first: int = 0) -> str | None:
    """Where the results of two runs differ first; ``first`` is the number of their first step."""
    for step, (a, b) in enumerate(zip(one, two, strict=True), start=first):
        for name, value in a[0].items():
            if not same_bits(value, b[0][name]):
                return f"world={len(a)}, step {step}: the result for {name!r} is different"
    return None
