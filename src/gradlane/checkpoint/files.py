"""The states of the ranks that saved, read on access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from ..core.strategy import Leaf
from ..errors import InvalidValue
from .manifest import FORMAT, Manifest
from .rankfile import read
from .tree import part_at, with_part

State = Mapping[str, Any]


class Files(Sequence[State]):
    """The saved state of each rank. A file is read when its rank is accessed: most ranks read only their own.

    ``into``: the state objects of a strategy that may differ from the one that saved; see ``rearranged``.
    """

    def __init__(self, folder: Path, manifest: Manifest, into: Sequence[Leaf] | None = None) -> None:
        self._folder, self._manifest, self._into = folder, manifest, into
        self._read: dict[int, State] = {}
        self._totals: dict[int, dict[str, float]] = {}
        self.left_out: list[str] = []

    @overload
    def __getitem__(self, rank: int) -> State: ...
    @overload
    def __getitem__(self, rank: slice) -> list[State]: ...
    def __getitem__(self, rank: int | slice) -> State | list[State]:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        if rank >= len(self):
            raise IndexError(rank)
        if rank not in self._read:
            self._read[rank] = self._state_of(rank)
        return self._read[rank]

    def __len__(self) -> int:
        return self._manifest.world

    def totals(self, rank: int) -> dict[str, float]:
        """What the rank had counted; nothing in the files of earlier versions."""
        self[rank]
        return self._totals[rank]

    def _state_of(self, rank: int) -> State:
        manifest = self._manifest
        head, state = read(self._folder / manifest.file(rank), manifest.files[rank])
        expected = {"format": FORMAT, "token": manifest.token, "rank": rank, "world": manifest.world}
        for key, value in expected.items():
            if head.get(key) != value:
                raise InvalidValue(
                    f"{manifest.file(rank)} has {key} {head.get(key)!r}, the manifest says {value!r}"
                )
        self._totals[rank] = _totals(head)
        if self._into is None:
            return state
        arranged, left_out = rearranged(state, _parts(head), self._into)
        self.left_out = left_out
        return arranged


Parts = dict[tuple[str, ...], str]


def _parts(head: Mapping[str, Any]) -> Parts:
    try:
        return {tuple(map(str, path)): str(owner) for path, owner in head["parts"]}
    except (KeyError, TypeError, ValueError):
        raise InvalidValue("the file does not name the owners of its states; it is damaged") from None


def _totals(head: Mapping[str, Any]) -> dict[str, float]:
    totals = head.get("totals", {})
    if isinstance(totals, dict) and all(type(value) in (int, float) for value in totals.values()):
        return totals
    raise InvalidValue("the totals of the file are not numbers by name; it is damaged")


def rearranged(state: State, parts: Parts, leaves: Sequence[Leaf]) -> tuple[dict[str, Any], list[str]]:
    """The state in the arrangement of another strategy, and the owners of the parts that do not fit there.

    A part goes to the same path if the same field of the same class is there; else to the only such field, if
    there is exactly one on both sides.
    """
    source = {leaf.path: leaf.path for leaf in leaves if parts.get(leaf.path) == leaf.owner}
    for leaf in leaves:
        there = [path for path, owner in parts.items() if owner == leaf.owner and path not in source.values()]
        here = [other for other in leaves if other.owner == leaf.owner and other.path not in source]
        if leaf in here and len(there) == len(here) == 1:
            source[leaf.path] = there[0]
    arranged: dict[str, Any] = {}
    for path, old in source.items():
        with_part(arranged, path, part_at(state, old))
    unused = [owner for path, owner in parts.items() if path not in source.values() and part_at(state, path)]
    return arranged, unused
