"""Requests on the lane, from the strategy to the network and back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..core.collectives import Request, Scope
from ..core.events import Event, Timing
from ..core.running import Running
from ..errors import RanksDisagree
from .base import Finish
from .failure import ConnectionBroke
from .finite_check import FiniteCheck
from .peers import Peers, Turn
from .perform import Pending, commit, issue
from .profiling import span


@dataclass(slots=True)
class Issued:
    pending: Pending
    event: Event
    began: float  # when the strategy turned to this request
    issued: float
    turn: float = 0.0  # when the lane had nothing before it any more
    answered: float = 0.0

    def told(self, *, last: bool) -> Event:
        """The event with its timing, when the strategy has taken the answer: its ``last``, or not."""
        timing = Timing(
            began=self.began,
            encode=self.issued - self.began,
            queued=self.turn - self.issued,
            collective=self.answered - self.turn,
            decode=time.perf_counter() - self.answered if last else 0.0,
        )
        return replace(self.event, timing=timing)


@dataclass(slots=True)
class Job:
    running: Running
    future: Future[Tensor]
    finish: Finish
    loud: bool
    issued: Issued | None = None
    error: BaseException | None = None


class Requests:
    """Issues and awaits them for a lane, whose hook and whose thread may do so at the same time.

    A step that is ``over`` issues nothing more: its connections are being closed, and new ones would be
    formed for nothing. Whatever goes wrong with a connection is a ``ConnectionBroke``.
    """

    def __init__(self, peers: Peers) -> None:
        self.turn, self._turn_of = 0, -1  # requests waited for in a step: begun and ended, so odd meanwhile
        self._peers = peers
        self._lock = threading.Lock()
        self._over: int | None = None
        self._sent_in: set[int] = set()  # steps under way that have sent something
        self._last_answer = 0.0

    def turn_to(self, step: int) -> None:
        if step != self._turn_of:
            self.turn, self._turn_of = 0, step

    def issue(self, request: Request, running: Running, turn: Turn, began: float) -> Issued:
        bucket = running.bucket
        group = self._group(request.over, turn, bucket.step)
        event = Event.of(request, bucket, running.phase, group.size())

        def room(peer: int, numel: int) -> Tensor:  # the same in every step: new pages are dear
            return bucket.empty(f"from {peer} in phase {event.phase}", numel, torch.uint8)

        try:
            pending = issue(group, request, bucket.divisor(request.over), room)
        except RuntimeError as error:
            raise ConnectionBroke from error
        return Issued(pending, event, began, time.perf_counter())

    def answered(self, issued: Issued) -> object:
        event = issued.event
        self.turn += 1
        try:
            with span(f"{event.kind} bucket {event.bucket} phase {event.phase}"):
                answer = issued.pending.wait()
        except RuntimeError as error:
            raise ConnectionBroke from error
        self.turn += 1
        issued.turn = max(issued.issued, self._last_answer)
        issued.answered = self._last_answer = time.perf_counter()
        return answer

    def commit(self, step: int, check: FiniteCheck) -> None:
        """A step counts only when every rank has come to its end.

        Without this a rank that fails after its last collective would be alone: the others would
        have taken the step already. One message of 24 bytes per step; none if nothing was sent.
        """
        if step not in self._sent_in or self._peers.world == 1:
            check.agreed = check.seen
            return
        try:
            group = self._group("world", "later", step)
            first, last, check.agreed = commit(group, step, check.seen)
        except RuntimeError as error:
            raise ConnectionBroke from error
        self._sent_in.discard(step)
        if first != last:
            raise RanksDisagree(
                f"the ranks are in different steps, from {first} to {last}: one of them ran a backward "
                "pass more than another; every rank must take the same number of steps (DDP has join() for "
                "uneven data)"
            )

    def end(self, step: int) -> None:
        """The step has failed."""
        with self._lock:
            self._over = step
            self._sent_in.clear()

    def is_over(self, step: int) -> bool:
        return self._over == step

    def forget(self) -> None:
        """A failed step may be run again."""
        self._over = None

    def _group(self, over: Scope, turn: Turn, step: int) -> Any:
        with self._lock:
            if self._over == step:
                raise ConnectionBroke from RuntimeError("the step has failed already")
            self._sent_in.add(step)
            return self._peers.group(over, turn, step)
