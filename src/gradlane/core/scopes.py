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


Members = Mapping[Scope, Sequence[int]]
"""The ranks of each scope that one rank is in."""


def members_of(rank: int, nodes: Sequence[Sequence[int]]) -> Members:
    """``nodes`` has the ranks of each node."""
    mine = next(node for node in nodes if rank in node)
    members: dict[Scope, Sequence[int]] = {"world": range(sum(map(len, nodes))), "node": list(mine)}
    if len({len(node) for node in nodes}) == 1:
        members["cross"] = [node[mine.index(rank)] for node in nodes]
    return members


def scopes_among(rank: int, members: Members) -> Scopes:
    return Scopes(
        {over: len(ranks) for over, ranks in members.items()},
        {over: list(ranks).index(rank) for over, ranks in members.items()},
    )


def scopes_of(rank: int, nodes: Sequence[Sequence[int]]) -> Scopes:
    return scopes_among(rank, members_of(rank, nodes))
