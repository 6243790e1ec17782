"""Watches collectives of torch that wait for the same ranks as the lane: DDP's and FSDP's own.

They run on torch's process groups, outside of the lane, and wait for the timeout of those groups without a
log line. The lane's thread watches them while it is idle.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator

from ..agree.limits import Limit
from ..lane.thread import ThreadLane
from ..lane.watchdog import FORWARD, Position, watch
from .step import Step

BROKEN = ("gloo", "pair closure", "onnection")
"""Parts of Gloo's error messages, mostly of file names, that no other error of DDP or FSDP contains."""


class TorchWaits(ABC):
    """The collectives that torch runs for one model.

    A rank that is late is logged. A wait ends after the limit, and a broken connection raises ``PeerLost``.
    This object keeps neither the model nor its step alive.
    """

    def __init__(self, lane: ThreadLane, step: Step, *, limit: Limit, of_group: Limit) -> None:
        self._lane = lane
        self._step = weakref.ref(step)
        self._shorter = limit.seconds < of_group.seconds  # else the group's own timeout ends the wait
        self._limit = limit if self._shorter else of_group
        self._trainer = threading.get_ident()
        self._inside = False  # in code of torch that may communicate
        self._last_position: Position | None = None
        self._since = 0.0
        self._watching = False

    @abstractmethod
    def _doing(self, error: BaseException | None = None) -> str | None:
        """What torch communicates now, or did when this error was raised; None if it does not."""

    @abstractmethod
    def _sever(self) -> None:
        """Close the connections of torch's group: ranks that wait for this one would wait for its timeout."""

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Around code of torch that may communicate. A broken connection becomes ``PeerLost``."""
        self._trainer = threading.get_ident()
        self._inside = True
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in BROKEN):
                raise
            where = f"{Position(self._next_step(), -1, FORWARD, '')}, {self._doing(error)}"
            raise self._lane.torch_connection_broke(where, error, self._limit, self._sever) from error
        finally:
            self._inside = False

    def check(self) -> None:
        """While torch waits, log which rank is late; end the wait after the limit. On the lane's thread."""
        position, now = self.position(), time.monotonic()
        if position != self._last_position:
            self._last_position, self._since = position, now
        if position is None:
            return
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="gradlane-late", daemon=True).start()
        # If the lane has lost a rank, torch waits for the same one: that it has waited long enough is known.
        if self._lane.has_lost_a_peer or (self._shorter and now - self._since > self._limit.seconds):
            self._since = now
            self._sever()

    def position(self) -> Position | None:
        doing = self._doing()
        return None if doing is None else Position(self._next_step(), -1, FORWARD, doing)

    def _watch(self) -> None:
        over = threading.Event()

        def where() -> Position | None:
            if (position := self.position()) is None:
                over.set()
            return position

        try:
            watch(self._lane.board, where, over)
        finally:
            self._watching = False

    def _next_step(self) -> int:
        step = self._step()
        return -1 if step is None else step.next
