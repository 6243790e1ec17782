"""The lane for backends whose collectives run on the device: no thread, a side stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..agree.board import Board
from ..core.bucket import Bucket
from ..core.collectives import Request, Scope
from ..core.events import Event, Listener, Timing, WeakListener
from ..core.running import Driver
from ..core.strategy import Reduced, Strategy
from ..core.streams import has_streams, on_stream, refuse_capture, used_by_current_stream
from ..errors import InvalidValue, PeerFailed, WrongState
from ..torch_internals import span
from .base import Finish, same
from .device_clock import DeviceClock, TimedJob
from .finite_check import FiniteCheck
from .perform import perform_on_stream
from .requests import Job
from .stand_in import StandIn
from .stream_commit import StreamCommit
from .stream_failures import StreamFailures


class StreamLane(Driver[Job]):
    """Drives the strategy to its end inside the hook; futures order streams, and the host does not wait.

    It uses DDP's own group, and one more for each other scope: NCCL and XCCL run collectives in the order of
    issue. All are issued by one thread, bucket by bucket, so that order is the same on all ranks. A rank that
    fails a step sends zeros in the rest of it (``StandIn``), so that the order stays the same. A step ends
    with one small message, for which the host waits in ``drain``.
    """

    def __init__(
        self,
        groups: Mapping[Scope, Any],
        device: torch.device,
        listener: Listener,
        board: Board | None = None,
    ) -> None:
        self.check = FiniteCheck()
        self._groups = dict(groups)
        self._listener = WeakListener(listener)
        self._device = device
        self._stream = torch.Stream(device) if has_streams(device) else None
        with self._working():
            self._commit = StreamCommit(device)
        self._failures = StreamFailures(self._groups, device, board)
        self._failure: BaseException | None = None
        self._stand_in: StandIn | None = None
        self._failed_step: int | None = None
        self._unfinished: list[Job] = []  # of this step; those before the last wait for a step_sum
        observed = has_streams(device) and listener.observed
        self._clock = DeviceClock(device) if observed else None
        self._event: Event | None = None  # of the request whose answer the strategy works on
        self._answered = 0.0

    @torch.no_grad()
    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, raises: bool = False
    ) -> Future[Tensor]:
        job = self._job(strategy, bucket, self._listener.on_note, finish, raises)
        if bucket.index == 0:
            self._unfinished.clear()  # of a backward that was given up
        self._unfinished.append(job)
        if bucket.is_last and self._clock is not None:
            self._clock.computed()
        with self._working():
            used_by_current_stream(bucket.flat)
            try:
                self._failures.refuse_if_broken()
                if self._failed_step == bucket.step:
                    self._continue_failed_step(job)
                else:
                    self._run(job)
            except Exception as error:  # noqa: BLE001  the trainer must get every error
                self._fail(job, error)
            finally:
                self.serving = None
        return job.future

    def _job(self, *options: Any) -> Job:
        return Job(*options) if self._clock is None else TimedJob(self._clock, *options)

    def _run(self, job: Job) -> None:
        self.serving = job
        with span("encode"):
            job.resume()
        self.advance(job)
        if job.bucket.is_last:
            self.meet(self._unfinished)
            self._end_step(job.bucket.step)

    def _end_step(self, step: int, failed: int | None = None) -> None:
        group = self._groups["world"]
        at_end = None if self._clock is None else partial(self._clock.end, step)
        self._commit.send(group, step, self.check, failed, at_end)

    def _fail(self, job: Job, error: Exception) -> None:
        """Keep the error, and go on sending what the other ranks wait for."""
        step, where = job.bucket.step, (self.serving or job).where()
        lost, self._unfinished = self._unfinished, []
        self._failed_step, self._stand_in = step, StandIn(self._group)
        self._failures.report(where, error)
        position = [job.bucket.index, job.performed]
        for each in lost:
            each.close()
            if each is not job or not job.raises:
                each.deliver(each.bucket.flat)
        try:
            if self._failures.broken is not None or job.raises:  # then no further bucket will come
                raise WrongState("this step cannot be completed")
            for each in lost:
                self._stand_in.take_over(each)
            if job.bucket.is_last:
                self._end_failed_step(self._stand_in, job.bucket)
        except Exception:  # noqa: BLE001  the first error is the one that counts
            self._stand_in = None
            self._failures.stop(where, error, position)
        if job.raises:
            raise error
        self._failure = self._failure or error

    def _continue_failed_step(self, job: Job) -> None:
        self._unfinished.remove(job)
        job.deliver(job.bucket.flat)
        if self._stand_in is not None:
            self._stand_in.take_over(job)
            if job.bucket.is_last:
                self._end_failed_step(self._stand_in, job.bucket)

    def _end_failed_step(self, stand_in: StandIn, bucket: Bucket) -> None:
        stand_in.end()
        self._end_step(bucket.step, failed=bucket.rank)

    def perform(self, running: Job, request: Request) -> object:
        group = self._group(request.over)
        event = Event.of(request, running.bucket, running.phase, group.size())
        began = time.perf_counter()
        if isinstance(running, TimedJob):
            running.asks(event)
        with span(f"{event.kind} bucket {event.bucket} phase {event.phase}"):
            answer = perform_on_stream(group, request, running.bucket.divisor(request.over))
        running.performed += 1
        self._answered = time.perf_counter()
        # Seconds on the host; the device does the work later (``DeviceClock``).
        timing = Timing(running.resumed, began - running.resumed, 0.0, self._answered - began, 0.0)
        self._event = replace(event, timing=timing)
        return answer

    @property
    def has_nodes(self) -> bool:
        return len(self._groups) > 1 or self._groups["world"].size() == 1

    def _group(self, over: Scope) -> Any:
        if over not in self._groups and not self.has_nodes:
            raise InvalidValue(
                f"over={over!r} has no process group; a strategy that asks for it says uses_nodes = True, "
                "and its groups are made when it is attached"
            )
        return self._groups.get(over, self._groups["world"])

    def performed(self, running: Job) -> None:
        event = self._event
        assert event is not None
        assert event.timing is not None
        if not isinstance(running.state, Request):
            decode = time.perf_counter() - self._answered
            event = replace(event, timing=replace(event.timing, decode=decode))
        self._listener.on_event(event)

    def finished(self, running: Job, reduced: Reduced) -> None:
        self.check.add(running.strategy, running.bucket, reduced)
        self._unfinished.remove(running)
        # Records an event on the side stream; DDP's stream waits for it.
        running.deliver(reduced.mean)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """On the side stream, after what the caller's stream has done so far, and outside of autocast: a
        backward inside of it would compute residuals in half width."""
        if self._stream is None:
            yield
            return
        refuse_capture(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with on_stream(self._stream), torch.autocast(self._device.type, enabled=False):
            yield

    def order(self) -> bool:
        """Gradients, metrics and the drift check read what the lane has written, and DDP waits for its
        futures only later."""
        if self._stream is None:
            return False
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        return self._commit.pending and self._failure is None

    def drain(self) -> None:
        """The host waits for what the ranks have agreed on."""
        self.order()
        if not self._commit.pending:
            self._forget_times()
            return
        try:
            outcome = self._commit.wait(self._failures.watch)
        except PeerFailed as lost:
            self._commit.give_up()
            self._forget_times()
            self._failure = self._failure or lost
            return
        self.check.agreed = outcome.rating
        self._failure = self._failure or self._failures.of(outcome)
        self._tell_times(waited=outcome.waited)

    def _tell_times(self, *, waited: bool) -> None:
        """The host has waited for the step, so its marks are passed."""
        if self._clock is not None and self._failure is None:
            times = self._clock.read(time.perf_counter(), waited=waited)
            if times is not None:
                self._listener.on_device_times(times)
        self._forget_times()

    def _forget_times(self) -> None:
        if self._clock is not None:
            self._clock.forget()

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    def forget_failure(self) -> None:
        self._failure = self._failed_step = None

    def where(self) -> str:
        return "idle" if self.serving is None else self.serving.where()

    def close(self) -> None:
        self._groups.clear()

    def leave(self) -> None:
        self.close()
