"""What the ranks of each node have saved of their parts, for nodes of another size."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ..core.layout import PART
from ..core.parts import part_name
from ..core.world_change import Slots
from ..errors import InvalidValue

State = Mapping[str, Any]


class Recut(Sequence[State]):
    """One state for each old node: what its ranks saved, joined, and cut to one of ``count`` parts.

    Files are read when a node is accessed, and only those of the node's ranks, if nodes were made of
    successive ranks. What is ``shared``, by its path, is equal in all nodes; where it cannot be cut, as the
    factors of a low rank, it begins anew.
    """

    def __init__(
        self,
        saved: Sequence[State],
        slots: Slots,
        shared: Container[tuple[str, ...]],
        place: int,
        count: int,
        part_shape: Callable[[torch.Size, int], torch.Size],
    ) -> None:
        self._saved, self._slots, self._shared = saved, slots, shared
        self._part_shape = part_shape
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

    def _joined(self, states: Sequence[State], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
        for key, first in states[0].items():
            if isinstance(first, Mapping):
                inside = [state.get(key, {}) for state in states]
                yield key, dict(self._joined(inside, (*path, key)))
                continue
            name = PART.sub("", key)
            if name == key and name not in self._slots:  # nothing of a parameter's, so nothing to cut
                yield key, first
                continue
            parts: list[Any] = [
                state.get(self._name(name, place, self._old_count)) for place, state in enumerate(states)
            ]
            if self._are_parts(name, parts):
                yield self._name(name, self._place, self._count), self._cut(self._slots[name].shape, parts)
            elif path not in self._shared:
                raise InvalidValue(
                    f"the state of {name!r} is not a part of a parameter that could be cut anew for "
                    f"{self._count} ranks per node; go on with {self._old_count}, or leave it out "
                    "(strict=False)"
                )

    @staticmethod
    def _name(parameter: str, place: int, count: int) -> str:
        return parameter if count == 1 else part_name(parameter, place, count)

    def _are_parts(self, name: str, parts: Sequence[object]) -> bool:
        slot = self._slots.get(name)
        shape = None if slot is None else self._shape(slot.shape, self._old_count)
        return all(isinstance(part, Tensor) and part.shape == shape for part in parts)

    def _cut(self, shape: torch.Size, parts: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([part.reshape(-1) for part in parts])[: shape.numel()]
        part = self._shape(shape, self._count)
        piece = whole[self._place * part.numel() : (self._place + 1) * part.numel()]
        return torch.cat([piece, piece.new_zeros(part.numel() - piece.numel())]).view(part)

    def _shape(self, shape: torch.Size, count: int) -> torch.Size:
        return shape if count == 1 else self._part_shape(shape, count)


def part_of(state: State) -> tuple[int, int]:
    """Place and count of the parts in a state; (0, 1) if it has whole parameters, or nothing."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            if (found := part_of(value)) != (0, 1):
                return found
        elif (part := PART.search(key)) is not None:
            return int(part[1]), int(part[2])
    return 0, 1
