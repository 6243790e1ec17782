"""What the ranks of each node have saved of their parts, for nodes of another size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ..core.layout import PART
from ..core.parts import part_name, part_shape
from ..core.world_change import Slots
from ..errors import InvalidValue

State = Mapping[str, Any]


class Recut(Sequence[State]):
    """One state for each old node: what its ranks saved, joined, and cut to one of ``count`` parts.

    Files are read when a node is accessed, and only those of the node's ranks, if nodes were made of
    successive ranks.
    """

    def __init__(self, saved: Sequence[State], slots: Slots, place: int, count: int) -> None:
        self._saved, self._slots = saved, slots
        self._place, self._count = place, count
        self._old_count = part_of(saved[0])[1]
        self._nodes: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self._saved) // self._old_count

    @overload
    def __getitem__(self, node: int) -> State: ...
    @overload
    def __getitem__(self, node: slice) -> list[State]: ...
    def __getitem__(self, node: int | slice) -> State | list[State]:
        if isinstance(node, slice):
            return [self[index] for index in range(*node.indices(len(self)))]
        ranks = self._ranks(node)
        if self._old_count == self._count:
            return self._saved[ranks[self._place]]
        return dict(self._joined([self._saved[rank] for rank in ranks]))

    def _ranks(self, node: int) -> list[int]:
        """The old ranks of a node, by their places in it."""
        first, count = node * self._old_count, self._old_count
        ranks = list(range(first, first + count))
        if self._nodes is None and [part_of(self._saved[rank])[0] for rank in ranks] == list(range(count)):
            return ranks
        if self._nodes is None:
            by_place: list[list[int]] = [[] for _ in range(count)]
            for rank, state in enumerate(self._saved):
                by_place[part_of(state)[0]].append(rank)
            self._nodes = [list(ranks) for ranks in zip(*by_place, strict=True)]
        return self._nodes[node]

    def _joined(self, states: Sequence[State]) -> Iterator[tuple[str, Any]]:
        for key, first in states[0].items():
            if isinstance(first, Mapping):
                yield key, dict(self._joined([state.get(key, {}) for state in states]))
                continue
            slot = PART.sub("", key)
            parts = [state.get(part_name(slot, place, self._old_count)) for place, state in enumerate(states)]
            if self._old_count == 1:
                parts = [first]
            yield (
                (part_name(slot, self._place, self._count) if self._count > 1 else slot),
                self._cut(slot, parts),
            )

    def _cut(self, name: str, parts: Sequence[Any]) -> Tensor:
        slot = self._slots.get(name)
        old = (
            None
            if slot is None
            else slot.shape
            if self._old_count == 1
            else part_shape(slot.shape, self._old_count)
        )
        if slot is None or any(not isinstance(part, Tensor) or part.shape != old for part in parts):
            raise InvalidValue(
                f"the state of {name!r} is not a part of a parameter that could be cut anew for "
                f"{self._count} ranks per node; go on with {self._old_count}, or leave it out (strict=False)"
            )
        whole = torch.cat([part.reshape(-1) for part in parts])[: slot.shape.numel()]
        if self._count == 1:
            return whole.view(slot.shape)
        shape = part_shape(slot.shape, self._count)
        piece = whole[self._place * shape.numel() : (self._place + 1) * shape.numel()]
        return torch.cat([piece, piece.new_zeros(shape.numel() - piece.numel())]).view(shape)


def part_of(state: State) -> tuple[int, int]:
    """Place and count of the parts in a state; (0, 1) if it has whole parameters, or nothing."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            if (found := part_of(value)) != (0, 1):
                return found
        elif (part := PART.search(key)) is not None:
            return int(part[1]), int(part[2])
    return 0, 1
