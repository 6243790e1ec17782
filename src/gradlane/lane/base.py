"""What a lane is, and the lanes of this process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Thread
from typing import Protocol
from weakref import WeakSet

from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.events import Listener, StepTimes
from ..core.strategy import Strategy
from .finite_check import FiniteCheck

Finish = Callable[[Tensor], Tensor]


def same(mean: Tensor) -> Tensor:
    return mean


class Lane(Protocol):
    """Runs strategies, one bucket after the other, in the order in which the buckets were submitted.

    The lane keeps an error and does not raise it: it completes the future with the bucket's own gradient, so
    that DDP's book-keeping stays intact, and ``take_failure`` returns the error to the code that may raise
    it. With ``raises``, the future itself gets the error, for callers that wait for it.
    """

    check: FiniteCheck

    @property
    def has_nodes(self) -> bool:
        """Whether requests may be over other scopes than the world."""

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, raises: bool = False
    ) -> Future[Tensor]:
        """Start to reduce a bucket. The future gets ``finish(mean)``."""

    def drain(self) -> None:
        """Wait until all buckets are done."""

    def order(self) -> bool:
        """Order what the caller's stream does next after all buckets, without waiting on the host. Whether
        that was possible: ``drain`` may then be called later, as long as nothing depends on its outcome."""

    def take_failure(self) -> BaseException | None:
        """The error of the last step, once."""

    def forget_failure(self) -> None:
        """A failed step may run again."""

    def close(self) -> None: ...
    def leave(self) -> None:
        """``close`` for finalizers: on any thread, at any time, without waiting and without raising."""

    def where(self) -> str:
        """What the lane is doing."""


class Book(Listener, Protocol):
    """Counts what a lane and its feed do."""

    def gradient(self, raw_bytes: int, dense_wire_bytes: int, last: bool) -> None: ...
    def skipped(self) -> None: ...
    def step_ended(self, times: StepTimes) -> None: ...


def completed_future(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


MANY = 8  # open lanes
END_TIMEOUT = 5.0  # seconds for the thread of a lane that nobody waits for

_open: WeakSet[Lane] = WeakSet()
_ending: set[Thread] = set()


def register_lane(lane: Lane) -> None:
    _open.add(lane)


def unregister_lane(lane: Lane) -> None:
    _open.discard(lane)


def open_lanes() -> list[Lane]:
    """All lanes of this process: if it hangs, their ``where`` says why."""
    return list(_open)


def register_ending(thread: Thread) -> None:
    """The thread of a lane ends by itself; nobody waits for it."""
    _ending.add(thread)


def unregister_ending(thread: Thread) -> None:
    _ending.discard(thread)


def join_ending_threads() -> None:
    """Wait until they have closed their connections: before the interpreter or a process group ends."""
    for thread in list(_ending):
        thread.join(END_TIMEOUT)


def collect_dropped_lanes() -> None:
    """Run the garbage collector if many lanes are open.

    A dropped model that is in a reference cycle stays until the next full collection. So do the threads and
    file descriptors of its lane, which the collector does not count.
    """
    if len(_open) >= MANY:
        gc.collect()
