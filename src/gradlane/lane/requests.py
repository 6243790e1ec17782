"""Requests on the lane, from the strategy to the network and back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.collectives import Request, Scope
from ..core.events import Event, Timing
from ..core.running import NoteTaker, Running, State
from ..core.strategy import Strategy
from ..core.streams import devices_of_futures
from ..torch_internals import span
from .base import Finish, same
from .failure import ConnectionBroke, different_steps
from .finite_check import FiniteCheck
from .peers import Peers, Queue
from .perform import Pending, commit, issue


@dataclass(slots=True)
class Issued:
    """A request that was issued, and its times."""

    pending: Pending
    event: Event
    began: float  # when the strategy began its work on it
    issued: float
    first_in_line: float = 0.0  # when the lane waited for no earlier request any more
    answered: float = 0.0

    def timed_event(self, *, last: bool) -> Event:
        """The event, when the strategy has taken the answer; ``last`` if it made no further request."""
        timing = Timing(
            began=self.began,
            encode=self.issued - self.began,
            queued=self.first_in_line - self.issued,
            collective=self.answered - self.first_in_line,
            decode=time.perf_counter() - self.answered if last else 0.0,
        )
        return replace(self.event, timing=timing)


class Job(Running):
    """A bucket on a lane, and the future that waits for its mean."""

    def __init__(
        self, strategy: Strategy, bucket: Bucket, take_note: NoteTaker, finish: Finish, raises: bool
    ) -> None:
        super().__init__(strategy, bucket, take_note)
        device = bucket.flat.device
        self.future: Future[Tensor] = Future(
            devices=[] if device.type == "cpu" else devices_of_futures(device)
        )
        self.raises = raises
        self.issued: Issued | None = None
        self.performed = 0
        """Requests that have an answer; counted where collectives run on the device."""
        self.error: BaseException | None = None
        self._finish = finish

    def resume(self, answer: object = None) -> State:
        if self.request is None:
            return super().resume(answer)
        with span("decode"):
            return super().resume(answer)

    def deliver(self, mean: Tensor) -> None:
        self.future.set_result(mean if self._finish is same else self._finish(mean))


class Requests:
    """Issues requests and waits for them; the hook and the lane's thread may do so at the same time.

    A step that has failed issues nothing more: its connections are being closed, and new ones would be formed
    in vain. Every error of a connection becomes a ``ConnectionBroke``.
    """

    def __init__(self, peers: Peers) -> None:
        self.progress = 0  # waits of this step, counted when they begin and when they end: odd during one
        self._progress_step = -1
        self._peers = peers
        self._lock = threading.Lock()
        self._failed: int | None = None  # a step
        self._sent_in: set[int] = set()  # steps under way that have sent something
        self._last_answer = 0.0

    def enter(self, step: int) -> None:
        if step != self._progress_step:
            self.progress, self._progress_step = 0, step

    def issue(self, request: Request, running: Running, queue: Queue) -> Issued:
        bucket = running.bucket
        group = self._group(request.over, queue, bucket.step)
        event = Event.of(request, bucket, running.phase, group.size())

        def buffer(peer: int, numel: int) -> Tensor:  # the same one in every step: new pages cost time
            return bucket.empty(f"from {peer} in phase {event.phase}", numel, torch.uint8)

        try:
            pending = issue(group, request, bucket.divisor(request.over), buffer)
        except RuntimeError as error:
            raise ConnectionBroke from error
        return Issued(pending, event, running.resumed, time.perf_counter())

    def wait(self, issued: Issued) -> object:
        """The answer."""
        event = issued.event
        self.progress += 1
        try:
            with span(f"{event.kind} bucket {event.bucket} phase {event.phase}"):
                answer = issued.pending.wait()
        except RuntimeError as error:
            raise ConnectionBroke from error
        self.progress += 1
        issued.first_in_line = max(issued.issued, self._last_answer)
        issued.answered = self._last_answer = time.perf_counter()
        return answer

    def commit(self, step: int, check: FiniteCheck) -> None:
        """A step counts only when every rank has reached its end.

        Without this, a rank that fails after its last collective would be alone: the others would already
        have taken the step. It is one message of 24 bytes per step, and none if nothing was sent.
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
            raise different_steps(first, last)

    def fail(self, step: int) -> None:
        """The step has failed."""
        with self._lock:
            self._failed = step
            self._sent_in.clear()

    def has_failed(self, step: int) -> bool:
        return self._failed == step

    def forget_failure(self) -> None:
        """A failed step may run again."""
        self._failed = None

    def _group(self, over: Scope, queue: Queue, step: int) -> Any:
        with self._lock:
            if self._failed == step:
                raise ConnectionBroke from RuntimeError("the step has failed already")
            self._sent_in.add(step)
            group = self._peers.groups.get((over, queue))
            return self._peers.group(over, queue, step) if group is None else group
