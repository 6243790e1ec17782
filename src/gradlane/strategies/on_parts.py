"""A strategy across nodes, on one part of each parameter: the base of ``Hierarchical`` and its like."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..core.parts import part_name
from ..core.scopes import ALONE, Scopes
from ..core.strategy import Strategy, named_states
from ..core.world_change import Expected, OneField, Slots
from ..errors import WrongType
from .feedback import EF21, ErrorFeedback
from .nesting import check_nesting
from .recut import Recut
from .weighted import WeightedMean


@dataclass
class OnParts(Strategy):
    """``cross`` works across nodes, on this rank's part of each parameter; the node's other ranks have the
    other parts. To ``cross`` the ranks are nodes, and a node's gradient is the mean of its ranks."""

    cross: Strategy
    linear: ClassVar[bool] = True
    keeps_privacy: ClassVar[bool] = False
    uses_nodes: ClassVar[bool] = True
    _scopes: Scopes = field(init=False, repr=False, compare=False, default=ALONE)
    _slots: Slots = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.cross, Strategy):
            raise WrongType(
                f"{name} cross={type(self.cross).__name__} is not a strategy; write "
                f"{name}(ErrorFeedback(Sharded(Int4())))"
            )
        check_nesting(self)

    @staticmethod
    @abstractmethod
    def part_shape(shape: torch.Size, count: int) -> torch.Size:
        """The shape of one of ``count`` parts of a parameter."""

    def refuses_inside(self, part: Strategy) -> str | None:
        name = type(self).__name__
        if isinstance(part, OnParts):
            return f"{type(part).__name__} inside {name}: there are two levels, nodes and ranks; use one"
        if part.uses_nodes or not part.alike:
            return (
                f"{type(part).__name__} inside {name} would leave ranks with different gradients; use "
                "a strategy that all ranks take part in"
            )
        if isinstance(part, WeightedMean):
            return (
                f"WeightedMean inside {name} would weigh each part by another rank's weight; {self._weights}"
            )
        return None

    _weights: ClassVar[str] = "put it outside: WeightedMean(weight, Hierarchical(...))"
    """What to do with weights instead."""

    def refuses_around(self, wrapper: Strategy) -> str | None:
        if not isinstance(wrapper, ErrorFeedback | EF21):
            return None
        name, own = type(wrapper).__name__, type(self).__name__
        return (
            f"{name} outside of {own} cannot know what was lost: it was lost of a sum over the node's "
            f"ranks. Put it inside: {own}({name}(...))"
        )

    def enter(self, scopes: Scopes, slots: Slots) -> None:
        self._scopes, self._slots = scopes, slots
        self.cross.enter(scopes.within("cross"), self.slots_inside(slots))

    def slots_inside(self, slots: Slots) -> Slots:
        place, count = self._part()
        if count == 1:
            return slots
        return {
            part_name(name, place, count): Expected(self.part_shape(slot.shape, count), slot.dtype)
            for name, slot in slots.items()
        }

    def _part(self) -> tuple[int, int]:
        """Which part of each parameter this rank has, and of how many."""
        return self._scopes.places["node"], self._scopes.sizes["node"]

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """What each old node has is joined from its ranks' parts, and cut anew."""
        place, count = self._part()
        shared = [leaf.path for leaf in named_states(self.cross) if getattr(leaf.state, "shared", False)]
        nodes = Recut(OneField(saved, "cross"), self._slots, shared, place, count, self.part_shape)
        state = self.carried_across(nodes)
        return {"cross": state} if state else {}

    def carried_across(self, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of ``cross``, made of what each old node has saved of this rank's part."""
        number, now = self._scopes.places["cross"], self._scopes.sizes["cross"]
        return dict(nodes[number]) if now == len(nodes) else self.cross.carried(nodes, number, now)
