"""What a lane is, and the lanes of this process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Protocol
from weakref import WeakSet

from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.collectives import Note
from ..core.events import Event, StepTimes
from ..core.strategy import Strategy
from .finite_check import FiniteCheck

Finish = Callable[[Tensor], Tensor]


def same(mean: Tensor) -> Tensor:
    return mean


class Listener(Protocol):
    """Hears of every performed request; runs on the lane, so it had better be quick."""

    def heard(self, event: Event) -> None: ...
    def noted(self, bucket: Bucket, note: Note) -> None: ...


class Faintly:
    """Tells a listener for as long as there is one. A lane's thread keeps its lane, and must not keep those
    who listen: observers may hold the model whose end is to be the end of the lane."""

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)

    def heard(self, event: Event) -> None:
        if (listener := self._listener()) is not None:
            listener.heard(event)

    def noted(self, bucket: Bucket, note: Note) -> None:
        if (listener := self._listener()) is not None:
            listener.noted(bucket, note)


class Lane(Protocol):
    """Runs strategies, one bucket after the other, in the order they were submitted.

    A failure is kept, not thrown: the future is completed with the bucket's own gradient, so that
    DDP's book-keeping stays whole, and ``take_failure`` hands the error to whoever may raise it.
    ``loud`` futures carry the error themselves, for callers that wait for them.
    """

    check: FiniteCheck

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, loud: bool = False
    ) -> Future[Tensor]:
        """``finish`` turns the mean into what the future holds."""

    def drain(self) -> None: ...
    def take_failure(self) -> BaseException | None: ...
    def forget_failure(self) -> None: ...
    def close(self) -> None: ...
    def leave(self) -> None:
        """``close`` for finalizers: on any thread, at any time, without waiting and without raising."""

    def where(self) -> str: ...


def completed_future(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


class Book(Listener, Protocol):
    def gradient(self, raw_bytes: int, dense_wire_bytes: int, last: bool) -> None: ...
    def skipped(self) -> None: ...
    def step_ended(self, times: StepTimes) -> None: ...


MANY = 8
PATIENCE = 5.0  # seconds for a lane to end that nobody closed

_living: WeakSet[Lane] = WeakSet()
_leaving: set[Thread] = set()


def born(lane: Lane) -> None:
    _living.add(lane)


def ended(lane: Lane) -> None:
    _living.discard(lane)


def living_lanes() -> list[Lane]:
    """For whoever finds the process stuck, to ask them ``where``."""
    return list(_living)


def leaves(thread: Thread) -> None:
    _leaving.add(thread)


def left(thread: Thread) -> None:
    _leaving.discard(thread)


def wait_for_the_leaving() -> None:
    """Before the interpreter goes, or a process group: their connections must not be in the middle of their
    end then."""
    for thread in list(_leaving):
        thread.join(PATIENCE)


def make_room() -> None:
    """A model that is in a cycle of references goes with the next full collection, which may be far; until
    then its lane keeps threads and descriptors that Python's collector knows nothing of."""
    if len(_living) >= MANY:
        gc.collect()
