"""The end of a step on a device: what all ranks agree on, in one message that the host reads once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.streams import has_streams
from .finite_check import FiniteCheck
from .perform import reduce_on_stream

SHORTEST, LONGEST = 20e-6, 1e-3  # seconds between two looks at an event
WATCH_EVERY = 1.0  # seconds


class Outcome(NamedTuple):
    """What all ranks know of a step."""

    first: int
    """The first step that any rank is in."""
    last: int
    rating: int
    failed: int | None
    """A rank that has failed the step."""
    waited: bool
    """The message had not arrived when this rank asked for it."""


class StreamCommit:
    """32 bytes of a step, for all ranks: ``send`` on the lane's stream, ``wait`` on the host.

    The device computes the rating, so the host need not know whether a result is finite before the step ends.
    It waits once, for a copy in pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        on_device = has_streams(device)
        self._given = torch.zeros(4, dtype=torch.int64, pin_memory=on_device)
        self._answer = torch.zeros(4, dtype=torch.int64, pin_memory=on_device)
        self._row = torch.zeros(4, dtype=torch.int64, device=device)
        self._copied = torch.Event(device) if on_device else None
        self.pending = False
        """A message was sent, and nobody has waited for it."""

    def send(
        self,
        group: Any,
        step: int,
        check: FiniteCheck,
        failed: int | None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """On the lane's stream, after all buckets. ``failed`` is this rank, if it has failed the step. The
        host waits for what ``at_end`` enqueues, too."""
        if self.pending:  # of a step that nobody ended: its copy may still read the row
            self.wait(_nothing)
        self._given[:] = torch.tensor([step, -step, 0, 0 if failed is None else failed + 1])
        self._row.copy_(self._given, non_blocking=True)
        if failed is None:
            check.write_rating(self._row[2])
        if group.size() > 1:
            reduce_on_stream(group, self._row, "max")
        self._answer.copy_(self._row, non_blocking=True)
        if at_end is not None:
            at_end()
        if self._copied is not None:
            self._copied.record(torch.accelerator.current_stream(self._row.device))
        self.pending = True

    def wait(self, watch: Callable[[], None]) -> Outcome:
        """The host waits. ``watch`` is called now and then, and may raise."""
        pause, watched, waited = SHORTEST, time.monotonic(), False
        while self._copied is not None and not self._copied.query():
            waited = True
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST)
            if time.monotonic() > watched + WATCH_EVERY:
                watched = time.monotonic()
                watch()
        self.pending = False
        last, first, rating, failed = self._answer.tolist()
        return Outcome(-first, last, rating, failed - 1 if failed else None, waited)

    def give_up(self) -> None:
        """Nobody will wait for the message."""
        self.pending = False


def _nothing() -> None:
    """Nobody watches."""
