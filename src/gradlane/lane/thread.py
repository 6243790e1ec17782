"""The lane for backends whose collectives complete on the host: one thread, one queue."""

from __future__ import annotations

import sys
import threading
import time
from queue import SimpleQueue
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.collectives import Request
from ..core.events import Event
from ..core.running import Running
from ..core.strategy import Strategy
from ..errors import PeerFailed, RanksDisagree, WrongState
from .base import Finish, Listener, same
from .peers import Peers
from .perform import commit, perform

_living: WeakSet[ThreadLane] = WeakSet()


def living_lanes() -> list[ThreadLane]:
    """The lanes of this process that are not closed; a watchdog asks them ``where``."""
    return list(_living)


class _Job(NamedTuple):
    strategy: Strategy
    bucket: Bucket
    future: Future[Tensor]
    finish: Finish
    loud: bool


class ThreadLane:
    """Runs all phases of bucket 0, then all of bucket 1, while backward goes on.

    Issue order is arrival order, and DDP launches its buckets in one order, so it is the same on
    every rank. torch's own hooks issue a second phase from a completion callback, where timing
    decides the order: that is why its PowerSGD hangs on Gloo with two buckets.
    """

    def __init__(self, peers: Peers, listener: Listener, name: str = "gradlane") -> None:
        self._peers = peers
        self._listener = listener
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._waiting = 0
        self._count = threading.Lock()
        self._failure: BaseException | None = None
        self._failed_step: int | None = None
        self._running: Running | None = None
        self._exchanged = False  # whether this step has sent anything
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _living.add(self)

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, loud: bool = False
    ) -> Future[Tensor]:
        if self._closed:
            raise WrongState("the lane is closed; attach again before you train on")
        future: Future[Tensor] = Future()
        with self._count:
            self._waiting += 1
            self._idle.clear()
        self._jobs.put(_Job(strategy, bucket, future, finish, loud))
        return future

    def drain(self) -> None:
        """Wait until nothing is under way. In Python, so that signals are served meanwhile."""
        self._idle.wait()

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    def where(self) -> str:
        """What the lane is doing, for whoever finds it stuck."""
        running = self._running
        return "idle" if running is None else running.where()

    def close(self) -> None:
        """Finish what is under way, end the thread, let go of the connections."""
        if self._closed:
            return
        self._closed = True
        _living.discard(self)
        self._jobs.put(None)
        self._thread.join(self._peers.timeout + 5 if self._idle.is_set() else 1)
        if self._thread.is_alive():  # it waits for a peer, and nobody waits for the result any more
            self._peers.abort()
            self._thread.join(5)
        self._peers.close()

    @torch.no_grad()
    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._serve(job)
            del job  # or the last bucket would live until the next one
            with self._count:
                self._waiting -= 1
                if not self._waiting:
                    self._idle.set()

    def _serve(self, job: _Job) -> None:
        bucket = job.bucket
        if self._failed_step == bucket.step:  # the others have given up this step too
            _complete(job, bucket.flat, self._failure)
            return
        running = self._running = Running(job.strategy, bucket, self._listener.noted)
        try:
            mean = self._driven(running)
            if bucket.is_last:
                self._commit(bucket.step)
        except BaseException as error:  # noqa: BLE001  whatever it is, the trainer must hear of it
            self._failure = self._failed(running, error)
            self._failed_step = bucket.step
            self._exchanged = False
            _complete(job, bucket.flat, self._failure)
        else:
            _complete(job, mean, None)
        finally:
            self._running = None

    def _driven(self, running: Running) -> Tensor:
        request = running.resume()
        while request is not None:
            request = running.resume(self._answer(request, running))
        assert running.reduced is not None
        return running.reduced.mean

    def _answer(self, request: Request, running: Running) -> object:
        bucket = running.bucket
        group = self._peers.group(request.over, bucket.step)
        event = Event.of(request, bucket, running.phase, group.size())
        self._exchanged = True
        start = time.perf_counter()
        try:
            answer = perform(group, request, bucket.divisor(request.over))
        except RuntimeError as error:
            raise _ConnectionBroke from error
        self._listener.heard(event, time.perf_counter() - start)
        return answer

    def _commit(self, step: int) -> None:
        """A step counts only when every rank has come to its end.

        Without this a rank that fails after its last collective would be alone: the others would
        have taken the step already. One message of 16 bytes per step; none if nothing was sent.
        """
        if not self._exchanged or self._peers.world == 1:
            return
        self._exchanged = False
        try:
            first, last = commit(self._peers.group("world", step), step)
        except RuntimeError as error:
            raise _ConnectionBroke from error
        if first != last:
            raise RanksDisagree(
                f"the ranks are in different steps, from {first} to {last}: one of them ran a backward "
                "pass more than another; every rank must take the same number of steps, or use join()"
            )

    def _failed(self, running: Running, error: BaseException) -> BaseException:
        """Tell the peers, let go of the connections, and say what to raise here."""
        where = running.where()
        running.close()
        if not isinstance(error, _ConnectionBroke | PeerFailed):
            self._peers.report(where, error, raised=True)
            self._peers.give_up()
            return _with_note(error, f"[gradlane: in {where}]")
        cause = error.__cause__ if isinstance(error, _ConnectionBroke) else error
        assert cause is not None
        self._peers.report(where, cause, raised=False)
        found = error if isinstance(error, PeerFailed) else self._peers.diagnose(where, cause)
        self._peers.give_up()
        return found


class _ConnectionBroke(Exception):
    """The backend failed, not the strategy; the cause tells how."""


def _complete(job: _Job, value: Tensor, failure: BaseException | None) -> None:
    if failure is not None and job.loud:
        job.future.set_exception(failure)  # type: ignore[arg-type]
    else:
        job.future.set_result(job.finish(value))


def _with_note(error: BaseException, note: str) -> BaseException:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} {note}", *error.args[1:])
    return error
