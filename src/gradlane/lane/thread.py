"""The lane for backends whose collectives complete on the host: one thread, one queue."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from torch.futures import Future

from ..agree.board import Board
from ..agree.limits import Limit
from ..core.bucket import Bucket
from ..core.collectives import Request
from ..core.events import Listener, WeakListener
from ..core.running import Driver, Running
from ..core.strategy import Reduced, Strategy
from ..errors import PeerFailed, PeerLost, RanksDisagree, WrongState
from ..log import log
from ..torch_internals import span
from .base import (
    END_TIMEOUT,
    Finish,
    register_ending,
    register_lane,
    same,
    unregister_ending,
    unregister_lane,
)
from .failure import ConnectionBroke, forget_groups, with_note
from .finite_check import FiniteCheck
from .peers import Peers
from .requests import Job, Requests
from .watchdog import heartbeat, position_of, watched

CLOSE_TIMEOUT = 1.0  # seconds for a step that is under way when its lane is closed


class ThreadLane(Driver[Job]):
    """Issues a bucket's first request in the hook, and serves the rest on a thread, bucket by bucket.

    DDP launches its buckets in one order, so the order of first requests is the same on every rank;
    the thread finishes bucket 0 before it looks at bucket 1, so the order of later requests is too,
    and they have a group of their own. torch's hooks issue a second phase from a completion callback,
    where timing decides the order: that is why its PowerSGD hangs on Gloo with two buckets.

    When a step fails on a rank, the rank reports the error and then severs its connections: everything that
    waits for it ends, here and at its peers. With open connections, two ranks could wait for each other, each
    in an all-reduce that the other has given up.
    """

    def __init__(self, peers: Peers, listener: Listener, name: str = "gradlane") -> None:
        self.check = FiniteCheck()
        self._peers = peers
        self._requests = Requests(peers)
        self._listener = WeakListener(listener)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._unfinished = 0  # jobs
        self._lock = threading.Lock()
        self._heartbeat = heartbeat(peers.timeout)
        self._stopped_step: int | None = None  # the hook issues nothing more in this step
        self._error: tuple[str, BaseException] | None = None  # the first error of a step, and where it was
        self._step_jobs: list[Job] = []  # of this step: those that are served or wait for a step_sum
        self._failed_jobs: list[Job] = []  # of the failed step, until its connections are closed
        self._failure: BaseException | None = None  # for the trainer
        self._closed = False
        self._ends_alone = False  # nobody waits for the thread
        self.when_idle: Callable[[], None] = _nothing
        """Called now and then while there is nothing to do; on the lane's thread, so it must not wait."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        register_lane(self)

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, raises: bool = False
    ) -> Future[Tensor]:
        if self._closed:
            raise WrongState("the lane is closed; attach again before you train on")
        job = Job(strategy, bucket, self._listener.on_note, finish, raises)
        with self._lock:
            self._unfinished += 1
            self._idle.clear()
        if self._stopped_step != bucket.step:
            try:
                with torch.no_grad():  # backward may be recording (create_graph)
                    self._start(job)
            except BaseException as error:  # noqa: BLE001  the thread raises it when it reaches this job
                job.error = error
                self._stopped_step = bucket.step
        self._jobs.put(job)
        return job.future

    def _start(self, job: Job) -> None:
        with span("encode"):
            request = job.resume()
            if isinstance(request, Request):
                job.issued = self._requests.issue(request, job, "first")

    def drain(self) -> None:
        """Wait until nothing is under way. In Python, so that signal handlers run meanwhile."""
        if self._idle.wait(self._heartbeat):
            return
        with watched(self._peers.board, lambda: position_of(self.serving, self._requests.progress)):
            while not self._idle.wait(1.0):
                if not self._thread.is_alive():
                    raise WrongState("the lane's thread is gone; its own error is in the log of this process")

    def order(self) -> bool:
        return False

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether the failure that nobody has taken yet is a lost rank."""
        return isinstance(self._failure, PeerLost)

    def forget_failure(self) -> None:
        self._stopped_step = self._failure = None
        self._requests.forget_failure()

    def where(self) -> str:
        serving = self.serving
        return "idle" if serving is None else serving.where()

    def close(self) -> None:
        """Finish what is under way, end the thread, close the connections. A job that still waits for a peer
        after a second is given up, and the peers get a report."""
        if self._closed:
            return
        self._closed = True
        unregister_lane(self)
        self._jobs.put(None)
        self._thread.join(self._peers.timeout + 5 if self._idle.is_set() else CLOSE_TIMEOUT)
        if self._thread.is_alive():
            self._abandon_step()
        else:
            self._peers.close()

    def _abandon_step(self) -> None:
        where = self.where()
        log.warning("closed while waiting for a peer (%s); the step is lost on all ranks", where)
        self._ends_alone = True
        register_ending(self._thread)
        self._peers.report(where, WrongState("closed in the middle of this step"), raised=True)
        self._peers.abandon(lambda: self._thread.join(END_TIMEOUT))

    @property
    def has_nodes(self) -> bool:
        return True  # groups are formed by the first request that needs them

    @property
    def board(self) -> Board:
        return self._peers.board

    def torch_connection_broke(
        self, where: str, error: BaseException, limit: Limit, close_torchs: Callable[[], None]
    ) -> PeerFailed:
        """A connection of torch's own group broke. Close torch's connections and the lane's: peers may wait
        there for this rank. Then find out who is lost."""
        self.drain()  # the lane may have buckets of an FSDP model; their peers still answer, or are lost too
        failure = self.take_failure()
        if isinstance(failure, PeerFailed):
            close_torchs()
            return failure
        self._peers.report(where, error, raised=False)
        close_torchs()
        self._peers.close()
        failure = self._peers.diagnose(where, error, limit)
        self._peers.start_over()
        return failure

    def leave(self) -> None:
        if self._closed:
            return
        self._closed = self._ends_alone = True
        register_ending(self._thread)
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            self._work()
            if self._ends_alone:
                self._peers.close()
                unregister_lane(self)
        finally:
            unregister_ending(self._thread)

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            self._serve(job)
            del job  # or the last bucket would stay alive until the next one
            with self._lock:
                self._unfinished -= 1
                done = not self._unfinished
            if done and self._failed_jobs:
                self._end_failed_step()
            if done:
                with self._lock:
                    if not self._unfinished:
                        self._idle.set()

    def _next_job(self) -> Job | None:
        while True:
            with contextlib.suppress(Empty):
                return self._jobs.get(timeout=self._heartbeat)
            with contextlib.suppress(Exception):  # an error in when_idle must not end the lane
                self.when_idle()

    def _serve(self, job: Job) -> None:
        bucket = job.bucket
        self.serving = job
        if bucket.index == 0:
            self._step_jobs.clear()  # of a backward that was given up
        self._requests.enter(bucket.step)
        self._step_jobs.append(job)
        try:
            if self._requests.has_failed(bucket.step):
                self._abandon_jobs()
                return
            if job.error is not None:
                raise job.error
            self.advance(job)
            if bucket.is_last:
                self.meet(self._step_jobs)
                self._requests.commit(bucket.step, self.check)
                assert isinstance(job.state, Reduced)
                self._deliver(job, job.state)
        except BaseException as error:  # noqa: BLE001  the trainer must get every error
            self._fail(self.serving or job, error)
            self._abandon_jobs()
        finally:
            self.serving = None

    def perform(self, running: Job, request: Request) -> object:
        if running.issued is None:
            running.issued = self._requests.issue(request, running, "later")
        answer = self._requests.wait(running.issued)
        running.bounded_answer = answer if running.issued.pending.bounded else None
        return answer

    def performed(self, running: Job) -> None:
        issued, running.issued = running.issued, None
        assert issued is not None
        self._listener.on_event(issued.timed_event(last=not isinstance(running.state, Request)))

    def finished(self, running: Job, reduced: Reduced) -> None:
        self.check.add(running.strategy, running.bucket, reduced)
        if not running.bucket.is_last:  # the last one waits until all ranks have reached the end of the step
            self._deliver(running, reduced)

    def _deliver(self, job: Job, reduced: Reduced) -> None:
        self._step_jobs.remove(job)
        job.deliver(reduced.mean)

    def _fail(self, running: Running, error: BaseException) -> None:
        """The step has failed: report it to the peers, and let those fail that wait for a later request."""
        self._stopped_step = running.bucket.step
        self._requests.fail(running.bucket.step)
        where = running.where()
        cause = error.__cause__ if isinstance(error, ConnectionBroke) else error
        assert cause is not None
        if not isinstance(error, ConnectionBroke | PeerFailed | RanksDisagree):
            with contextlib.suppress(Exception):  # this rank has its own error to report
                # After a failure peers may form new connections with this rank in this step: it takes part,
                # and closes them again.
                self._peers.group("world", "later", running.bucket.step)
        self._error = (where, error)
        forget_groups(error)
        if not self._ends_alone:  # else the report was written when the step was abandoned
            self._peers.report(where, cause, raised=not isinstance(error, ConnectionBroke | PeerFailed))
        self._peers.sever("first")

    def _abandon_jobs(self) -> None:
        """End what the jobs of a failed step have issued; keep the jobs until the connections are closed."""
        for job in self._step_jobs:
            if job.issued is not None:
                job.issued.pending.abandon()
            self._peers.drop("later")  # nothing else of this rank was under way there
            job.close()
        self._failed_jobs += self._step_jobs
        self._step_jobs.clear()

    def _end_failed_step(self) -> None:
        """Everything that this rank has issued in the failed step has ended: close, and find out why."""
        if self._error is not None:
            where, error = self._error
            self._error = None
            self._peers.drop("first")
            if isinstance(error, ConnectionBroke):
                assert error.__cause__ is not None
                self._failure = self._peers.diagnose(where, error.__cause__)
            else:
                self._failure = with_note(error, f"[gradlane: in {where}]")
            self._peers.start_over()
        for job in self._failed_jobs:
            if job.raises and self._failure is not None:
                job.future.set_exception(self._failure)  # type: ignore[arg-type]
            else:
                job.deliver(job.bucket.flat)
        self._failed_jobs.clear()


def _nothing() -> None:
    """The default of ``when_idle``."""
