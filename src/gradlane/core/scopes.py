"""The scopes of a rank: all ranks, those of its node, and those that have its place in the other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .collectives import SCOPES, Scope


class Scopes(NamedTuple):
    """How many ranks each scope has, and this rank's place among them.

    There is no "cross" where nodes have different numbers of ranks.
    """

    sizes: Mapping[str, int]
    places: Mapping[str, int]

    @property
    def world(self) -> int:
        return self.sizes["world"]

    @property
    def rank(self) -> int:
        return self.places["world"]

    def within(self, over: Scope) -> Scopes:
        """As a strategy sees it whose world is this scope."""
        return Scopes({"world": self.sizes[over]}, {"world": self.places[over]})


ALONE = Scopes(dict.fromkeys(SCOPES, 1), dict.fromkeys(SCOPES, 0))
"""Of a rank without peers."""


def scopes_of(rank: int, nodes: Sequence[Sequence[int]]) -> Scopes:
    """The scopes of one rank; ``nodes`` has the ranks of each node."""
    mine = next(node for node in nodes if rank in node)
    index = mine.index(rank)
    sizes = {"world": sum(map(len, nodes)), "node": len(mine)}
    places = {"world": rank, "node": index}
    if len({len(node) for node in nodes}) == 1:
        sizes["cross"], places["cross"] = len(nodes), nodes.index(mine)
    return Scopes(sizes, places)
