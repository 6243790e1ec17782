"""The lane for backends whose collectives run on the device: no thread, a side stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.collectives import Request, Scope
from ..core.events import Event, Listener, Timing, WeakListener
from ..core.running import Driver
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue
from ..torch_internals import span
from .base import Finish, same
from .finite_check import FiniteCheck
from .perform import perform_on_stream
from .requests import Job


class StreamLane(Driver[Job]):
    """Drives the strategy to its end inside the hook; ``wait`` orders streams and does not block.

    It uses DDP's own group, and one more for each other scope: NCCL and XCCL run collectives in the order of
    issue. All are issued by one thread, bucket by bucket, so that order is the same on all ranks.
    """

    def __init__(self, groups: Mapping[Scope, Any], device: torch.device, listener: Listener) -> None:
        self.check = FiniteCheck()
        self._groups = dict(groups)
        self._listener = WeakListener(listener)
        self._device = device
        self._stream = torch.Stream(device) if device.type in ("cuda", "xpu") else None
        self._failure: BaseException | None = None
        self._unfinished: list[Job] = []  # of this step; those before the last wait for a step_sum
        self._event: Event | None = None  # of the request whose answer the strategy works on
        self._answered = 0.0

    @torch.no_grad()
    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, raises: bool = False
    ) -> Future[Tensor]:
        job = Job(strategy, bucket, self._listener.on_note, finish, raises)
        if bucket.index == 0:
            self._unfinished.clear()  # of a backward that was given up
        self._unfinished.append(job)
        with self._on_stream():
            try:
                self.serving = job
                with span("encode"):
                    job.resume()
                self.advance(job)
                if bucket.is_last:
                    self.meet(self._unfinished)
            except Exception as error:  # noqa: BLE001  the trainer must get every error
                self._fail(job, error)
            finally:
                self.serving = None
        return job.future

    def _fail(self, job: Job, error: Exception) -> None:
        lost, self._unfinished = self._unfinished, []
        for each in lost:
            each.close()
            if each is not job or not job.raises:
                each.deliver(each.bucket.flat)
        if job.raises:
            raise error
        self._failure = error

    def perform(self, running: Job, request: Request) -> object:
        group = self._group(request.over)
        event = Event.of(request, running.bucket, running.phase, group.size())
        began = time.perf_counter()
        with span(f"{event.kind} bucket {event.bucket} phase {event.phase}"):
            answer = perform_on_stream(group, request, running.bucket.divisor(request.over))
        self._answered = time.perf_counter()
        # Seconds on the host; the device does the work later, and only a profiler sees it.
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

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self._stream

    def drain(self) -> None:
        """Nothing waits on the host; DDP orders its streams after the futures."""
        if self.check.on:  # whether the step counts must be known before the next step
            self.check.agreed = self.check.seen

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    def forget_failure(self) -> None:
        self._failure = None

    def where(self) -> str:
        return "idle" if self.serving is None else self.serving.where()

    def close(self) -> None:
        self._groups.clear()

    def leave(self) -> None:
        self.close()
