"""The ranks of a device mesh as one group, and those of its dimensions as scopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..core.collectives import Scope
from ..core.scopes import Members
from ..torch_internals import default_group, store_of_group


class MeshRanks:
    """All ranks of a mesh, which torch has no process group for: it has one for each dimension.

    The lane needs none. Its ranks agree through the store, and form connections of their own.
    """

    def __init__(self, backing: Any, ranks: Sequence[int]) -> None:
        self.backing = backing
        """The process group of the job, whose store, backend and timeout hold here too."""
        self.ranks = tuple(ranks)

    def rank(self) -> int:
        return self.ranks.index(self.backing.rank())

    def size(self) -> int:
        return len(self.ranks)

    def get_group_store(self) -> dist.Store:
        ranks = ",".join(map(str, self.ranks))
        return dist.PrefixStore(f"gradlane/mesh/{ranks}", store_of_group(self.backing))


class Mesh(NamedTuple):
    """The scopes of a mesh: its ranks by their index in ``MeshRanks``, and torch's groups for them."""

    members: Members
    groups: Mapping[Scope, Any]


def backing(group: Any) -> Any:
    """The process group of torch that says for ``group`` which backend it has, and how long it waits."""
    return group.backing if isinstance(group, MeshRanks) else group


_known: WeakKeyDictionary[Any, dict[tuple[int, ...], MeshRanks]] = WeakKeyDictionary()


def mesh_ranks(ranks: Sequence[int]) -> MeshRanks:
    """The same object for the same ranks: lanes are counted by it."""
    default = default_group()
    known = _known.setdefault(default, {})
    return known.setdefault(tuple(ranks), MeshRanks(default, ranks))
