"""Nodes of several ranks each, as ``gradlane bench --nodes 2 --per-node 2`` has them."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidValue

MOST_RANKS = 64


@dataclass(frozen=True)
class Nodes:
    """``count`` nodes of ``per_node`` successive ranks, which share the node's link to the other nodes."""

    count: int
    per_node: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise InvalidValue(f"nodes={self.count} has no link between nodes; use 2 or more, or --ranks")
        if self.per_node < 1:
            raise InvalidValue(f"per_node={self.per_node} has no ranks; use 1 or more")
        if self.ranks > MOST_RANKS:
            raise InvalidValue(
                f"{self.count} nodes of {self.per_node} are {self.ranks} ranks, too many for one machine; "
                f"use {MOST_RANKS} at most"
            )

    @property
    def ranks(self) -> int:
        return self.count * self.per_node

    def __str__(self) -> str:
        return f"{self.count} nodes of {self.per_node} rank{'s' if self.per_node > 1 else ''}"


def nodes_from(nodes: int | None, per_node: int | None, ranks: object) -> Nodes | None:
    """Of the options of a command; None where no nodes are asked for."""
    if nodes is None and per_node is None:
        return None
    if nodes is None:
        raise InvalidValue(f"--per-node {per_node} has no number of nodes; add --nodes 2, or use --ranks")
    if per_node is None:
        raise InvalidValue(f"--nodes {nodes} does not say how many ranks a node has; add --per-node 2")
    if ranks:
        raise InvalidValue(
            f"--ranks and --nodes exclude each other: {nodes} nodes of {per_node} have {nodes * per_node} "
            "ranks; leave --ranks out"
        )
    return Nodes(nodes, per_node)
