"""The lane for backends whose collectives complete on the host: one thread, one queue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from torch.futures import Future

from ..agree.board import Board
from ..agree.limits import Limit
from ..core.bucket import Bucket
from ..core.running import Running, step_total
from ..core.strategy import Strategy
from ..errors import PeerFailed, RanksDisagree, WrongState
from ..log import log
from .base import PATIENCE, Faintly, Finish, Listener, born, ended, leaves, left, same
from .failure import ConnectionBroke, forget_groups, with_note
from .finite_check import FiniteCheck
from .peers import Peers
from .profiling import span
from .requests import Job, Requests
from .watchdog import place_of, pulse, watched

SOON = 1.0  # seconds for what is under way when a lane is closed


class ThreadLane:
    """Issues a bucket's first request in the hook, and serves the rest on a thread, bucket by bucket.

    DDP launches its buckets in one order, so the order of first requests is the same on every rank;
    the thread finishes bucket 0 before it looks at bucket 1, so the order of later requests is too,
    and they have a group of their own. torch's hooks issue a second phase from a completion callback,
    where timing decides the order: that is why its PowerSGD hangs on Gloo with two buckets.

    When a step fails on a rank it tells why, then severs its connections: whatever waits for it ends, here
    and at its peers. Left open, two ranks could wait for each other, each in an all-reduce the other lost.
    """

    def __init__(self, peers: Peers, listener: Listener, name: str = "gradlane") -> None:
        self.check = FiniteCheck()
        self._peers = peers
        self._requests = Requests(peers)
        self._listener = Faintly(listener)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._waiting = 0  # jobs that are not done
        self._lock = threading.Lock()
        self._stopped_step: int | None = None  # the hook issues nothing more in this step
        self._error: tuple[str, BaseException] | None = None  # what went wrong first, and where
        self._open: list[Job] = []  # jobs that wait for their step's other buckets, or are served now
        self._lost: list[Job] = []  # jobs of the failed step, until its connections are closed
        self._failure: BaseException | None = None  # for the trainer
        self._serving: Running | None = None
        self._closed = self._leaving = False
        self.when_idle: Callable[[], None] = _nothing
        """Asked now and then while there is nothing to do; on the lane's thread, so it must not wait."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        born(self)

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, loud: bool = False
    ) -> Future[Tensor]:
        if self._closed:
            raise WrongState("the lane is closed; attach again before you train on")
        job = Job(Running(strategy, bucket, self._listener.noted, self.check.look), Future(), finish, loud)
        with self._lock:
            self._waiting += 1
            self._idle.clear()
        if self._stopped_step != bucket.step:
            try:
                with torch.no_grad():  # backward may be recording (create_graph)
                    self._start(job)
            except BaseException as error:  # noqa: BLE001  the thread takes it from here, in its order
                job.error = error
                self._stopped_step = bucket.step
        self._jobs.put(job)
        return job.future

    def _start(self, job: Job) -> None:
        began = time.perf_counter()
        with span("encode"):
            request = job.running.resume()
            if request is not None:
                job.issued = self._requests.issue(request, job.running, "first", began)

    def drain(self) -> None:
        """Wait until nothing is under way. In Python, so that signals are served meanwhile."""
        if self._idle.wait(pulse(self._peers.timeout)):
            return
        with watched(self._peers.board, lambda: place_of(self._serving, self._requests.turn)):
            while not self._idle.wait(1.0):
                if not self._thread.is_alive():
                    raise WrongState("the lane's thread is gone; its own error is in the log of this process")

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    def forget_failure(self) -> None:
        self._stopped_step = self._failure = None
        self._requests.forget()

    def where(self) -> str:
        """What the lane is doing, for whoever finds it stuck."""
        serving = self._serving
        return "idle" if serving is None else serving.where()

    def close(self) -> None:
        """Finish what is under way, end the thread, let go of the connections. What waits for a peer after a
        second is given up, and the peers are told."""
        if self._closed:
            return
        self._closed = True
        ended(self)
        self._jobs.put(None)
        self._thread.join(self._peers.timeout + 5 if self._idle.is_set() else SOON)
        if self._thread.is_alive():
            self._walk_out()
        else:
            self._peers.close()

    def _walk_out(self) -> None:
        where = self.where()
        log.warning("closed while waiting for a peer (%s); the step is lost on all ranks", where)
        self._leaving = True
        leaves(self._thread)
        self._peers.report(where, WrongState("closed in the middle of this step"), raised=True)
        self._peers.abandon(lambda: self._thread.join(PATIENCE))

    @property
    def board(self) -> Board:
        return self._peers.board

    def lost_elsewhere(
        self, where: str, error: BaseException, limit: Limit, let_go: Callable[[], None]
    ) -> PeerFailed:
        """A connection that is not the lane's broke, while nothing is under way here. Close all, ``let_go``
        of those: peers might wait there for this rank. And find out who is lost."""
        self._peers.report(where, error, raised=False)
        let_go()
        self._peers.close()
        failure = self._peers.diagnose(where, error, limit)
        self._peers.next_life()
        return failure

    def leave(self) -> None:
        if self._closed:
            return
        self._closed = self._leaving = True
        leaves(self._thread)
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            self._work()
            if self._leaving:  # nobody waits for this thread: it cleans up itself
                self._peers.close()
                ended(self)
        finally:
            left(self._thread)

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._serve(job)
            del job  # or the last bucket would live until the next one
            with self._lock:
                self._waiting -= 1
                done = not self._waiting
            if done and self._lost:
                self._give_up()
            if done:
                with self._lock:
                    if not self._waiting:
                        self._idle.set()

    def _next(self) -> Job | None:
        every = pulse(self._peers.timeout)
        while True:
            with contextlib.suppress(Empty):
                return self._jobs.get(timeout=every)
            with contextlib.suppress(Exception):  # a look must not end the lane
                self.when_idle()

    def _serve(self, job: Job) -> None:
        self._serving = job.running
        bucket = job.running.bucket
        if bucket.index == 0:
            self._open.clear()  # of a backward that was given up
        self._requests.turn_to(bucket.step)
        self._open.append(job)
        try:
            if self._requests.is_over(bucket.step):
                self._lose_all()
                return
            if job.error is not None:
                raise job.error
            self._advance(job)
            if bucket.is_last:
                self._meet()
                self._requests.commit(bucket.step, self.check)
                self._deliver(job)
        except BaseException as error:  # noqa: BLE001  whatever it is, the trainer must hear of it
            self._fail(self._serving, error)
            self._lose_all()
        finally:
            self._serving = None

    def _meet(self) -> None:
        """The step's last bucket is here: all that wait for a sum over the step get it, in their order."""
        while waiting := [job for job in self._open if job.running.meeting is not None]:
            total = step_total([job.running for job in waiting])
            for job in waiting:
                self._serving, began = job.running, time.perf_counter()
                request = job.running.resume(total)
                if request is not None:
                    job.issued = self._requests.issue(request, job.running, "later", began)
                self._advance(job)

    def _deliver(self, job: Job) -> None:
        assert job.running.reduced is not None
        self._open.remove(job)
        job.future.set_result(job.finish(job.running.reduced.mean))

    def _advance(self, job: Job) -> None:
        """To its end, or to where it waits for the step's other buckets. The last waits for all to end."""
        while (issued := job.issued) is not None:
            answer = self._requests.answered(issued)
            job.running.bounded = answer if issued.pending.bounded else None
            job.issued = request = None
            try:
                with span("decode"):
                    request = job.running.resume(answer)
            finally:  # it was sent, whatever the strategy makes of the answer
                self._listener.heard(issued.told(last=request is None))
            if request is not None:
                job.issued = self._requests.issue(request, job.running, "later", issued.answered)
        if job.running.meeting is None and not job.running.bucket.is_last:
            self._deliver(job)

    def _fail(self, running: Running, error: BaseException) -> None:
        """The step is lost: tell the peers, and let those fail that wait for a later request."""
        self._stopped_step = running.bucket.step
        self._requests.end(running.bucket.step)
        where = running.where()
        cause = error.__cause__ if isinstance(error, ConnectionBroke) else error
        assert cause is not None
        if not isinstance(error, ConnectionBroke | PeerFailed | RanksDisagree):
            with contextlib.suppress(Exception):  # this rank has its own error to tell
                # After a failure peers may look for this rank in this step: it meets them, only to let go.
                self._peers.group("world", "later", running.bucket.step)
        self._error = (where, error)
        forget_groups(error)
        if not self._leaving:  # else it was told why
            self._peers.report(where, cause, raised=not isinstance(error, ConnectionBroke | PeerFailed))
        self._peers.sever("first")

    def _lose_all(self) -> None:
        """Jobs of a failed step: end what they have issued, keep them until the connections are closed."""
        for job in self._open:
            if job.issued is not None:
                job.issued.pending.abandon()
            self._peers.drop("later")  # nothing else of ours was under way there
            job.running.close()
        self._lost += self._open
        self._open.clear()

    def _give_up(self) -> None:
        """All that this rank has issued in the failed step has ended: close, and say what happened."""
        if self._error is not None:
            where, error = self._error
            self._error = None
            self._peers.drop("first")
            if isinstance(error, ConnectionBroke):
                assert error.__cause__ is not None
                self._failure = self._peers.diagnose(where, error.__cause__)
            else:
                self._failure = with_note(error, f"[gradlane: in {where}]")
            self._peers.next_life()
        for job in self._lost:
            if job.loud and self._failure is not None:
                job.future.set_exception(self._failure)  # type: ignore[arg-type]
            else:
                job.future.set_result(job.finish(job.running.bucket.flat))
        self._lost.clear()


def _nothing() -> None:
    """Most lanes have nothing else to look at."""
