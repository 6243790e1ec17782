"""The bytes that one rank of an arm sends, and those that its node sends to other nodes."""

from __future__ import annotations

from ..core.collectives import Kind, Scope
from ..core.events import Event, wire_bytes
from ..core.uplink import uplink_bytes, uplink_of
from .nodes import Nodes


class Traffic:
    """Counts from the start of the arm. It keeps the events of a strategy until they are taken."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        self.events: list[Event] = []
        self.sent_bytes = 0
        """By this rank."""
        self.uplink_bytes = 0
        """By all ranks of this rank's node, to other nodes; 0 without nodes."""
        self._nodes = nodes

    def step_done(self) -> None:
        """After each step: count what nothing else has counted."""

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def on_event(self, event: Event) -> None:
        """A request of a strategy."""
        self.events.append(event)
        self.sent_bytes += event.wire_bytes
        if self._nodes is not None:
            self.uplink_bytes += uplink_of(event, self._nodes.ranks, self._nodes.per_node)

    def add(self, kind: Kind, payload_bytes: int, size: int, over: Scope = "world") -> None:
        """A collective of torch. On Gloo all of them are rings of ``size`` ranks."""
        sent = wire_bytes(kind, payload_bytes, size)
        self.sent_bytes += sent
        if self._nodes is not None:
            self.uplink_bytes += uplink_bytes(sent, over, self._nodes.ranks, self._nodes.per_node, ring=True)
