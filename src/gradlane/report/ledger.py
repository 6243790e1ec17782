"""Bytes, seconds and counts of one attachment, as one flat dict for any logger."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import Note
from ..core.events import Event

Observer = Callable[[Event], None]


class Ledger:
    """Adds up what a lane reports; one lane writes, anybody may read."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self.steps = 0
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.payload_bytes = 0
        self.dense_wire_bytes = 0
        self.collectives = 0
        self.seconds = 0.0
        self.exposed_seconds = 0.0
        self._lock = threading.Lock()
        self._figures: dict[str, Tensor | float] = {}

    def heard(self, event: Event, seconds: float) -> None:
        self.collectives += 1
        self.payload_bytes += event.payload_bytes
        self.wire_bytes += event.wire_bytes
        self.seconds += seconds
        if self._observer is not None:
            self._observer(event)

    def noted(self, bucket: Bucket, note: Note) -> None:
        with self._lock:  # the hook's thread and the lane's may both have something to note
            for name, value in note.figures.items():
                kept = value.detach() if isinstance(value, Tensor) else value
                self._figures[name] = self._figures.get(name, 0) + kept

    def waited(self, seconds: float) -> None:
        self.exposed_seconds += seconds

    def gradient(self, raw_bytes: int, dense_wire_bytes: int, last: bool) -> None:
        """A bucket came in: its own size, and what a plain all-reduce of it would send."""
        self.raw_bytes += raw_bytes
        self.dense_wire_bytes += dense_wire_bytes
        self.steps += last

    def metrics(self) -> dict[str, float]:
        figures: dict[str, float] = {
            "comm/steps": self.steps,
            "comm/collectives": self.collectives,
            "comm/bytes_raw": self.raw_bytes,
            "comm/bytes_payload": self.payload_bytes,
            "comm/bytes_wire": self.wire_bytes,
            "comm/ratio": self.dense_wire_bytes / self.wire_bytes if self.wire_bytes else 1.0,
            "comm/seconds": self.seconds,
            "comm/exposed_seconds": self.exposed_seconds,
            "comm/overflow": 0.0,
            "comm/underflow": 0.0,
        }
        figures.update({f"comm/{name}": float(value) for name, value in self._figures.items()})
        return figures
