"""What the ranks of a node send to other nodes together: they share the node's link."""

from __future__ import annotations

from .collectives import Scope
from .events import Event


def uplink_bytes(sent: int, over: Scope, world: int, per_node: int, *, ring: bool) -> int:
    """Bytes on the link of one node, for a collective in which each rank sends ``sent``.

    A ring of successive ranks leaves a node once, so the node sends what one rank sends. Direct sends leave
    it from every rank, for ``world - per_node`` of the ``world - 1`` peers.
    """
    if over == "node" or world == per_node:
        return 0
    if over == "cross":
        return per_node * sent
    return sent if ring else round(per_node * sent * (world - per_node) / (world - 1))


def uplink_of(event: Event, world: int, per_node: int) -> int:
    """The same for a request of a strategy: all-reduces are rings, and all others are direct sends."""
    ring = event.kind == "all_reduce"
    return uplink_bytes(event.wire_bytes, event.over, world, per_node, ring=ring)
