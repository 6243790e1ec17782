"""The lane for backends whose collectives run on the device: no thread, a side stream."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.events import Event, Timing
from ..core.running import Running, step_total
from ..core.strategy import Strategy
from ..errors import InvalidValue
from .base import Faintly, Finish, Listener, same
from .finite_check import FiniteCheck
from .perform import perform_on_stream
from .profiling import span


@dataclass(slots=True)
class _Waiting:
    running: Running
    future: Future[Tensor]
    finish: Finish


class StreamLane:
    """Drives the strategy to its end inside the hook; ``wait`` orders streams and does not block.

    On DDP's own group: NCCL and XCCL run collectives in the order of issue. Only ``over="world"``, but of one
    rank.
    """

    def __init__(self, group: Any, device: torch.device, listener: Listener) -> None:
        self.check = FiniteCheck()
        self._group = group
        self._listener = Faintly(listener)
        self._device = device
        self._stream = torch.Stream(device) if device.type in ("cuda", "xpu") else None
        self._failure: BaseException | None = None
        self._waiting: list[_Waiting] = []  # for their step's other buckets
        self._where = "idle"

    @torch.no_grad()
    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, loud: bool = False
    ) -> Future[Tensor]:
        job = _Waiting(
            Running(strategy, bucket, self._listener.noted, self.check.look),
            Future(devices=[self._device] if self._stream else []),
            finish,
        )
        if bucket.index == 0:
            self._waiting.clear()  # of a backward that was given up
        self._waiting.append(job)
        with self._on_stream():
            try:
                self._advance(job, None)
                while bucket.is_last and self._waiting:
                    total = step_total([waiting.running for waiting in self._waiting])
                    for waiting in list(self._waiting):
                        self._advance(waiting, total)
            except Exception as error:
                lost, self._waiting = self._waiting, []
                for waiting in lost:
                    waiting.running.close()
                    if waiting is not job or not loud:
                        waiting.future.set_result(waiting.finish(waiting.running.bucket.flat))
                if loud:
                    raise
                self._failure = error
        return job.future

    def _advance(self, job: _Waiting, answer: object) -> None:
        """To its end, or to where it waits for the step's other buckets."""
        self._drive(job.running, answer)
        if job.running.meeting is None:
            assert job.running.reduced is not None
            self._waiting.remove(job)
            # Records an event on the side stream; DDP's stream waits for it.
            job.future.set_result(job.finish(job.running.reduced.mean))

    def _drive(self, running: Running, answer: object) -> None:
        began = time.perf_counter()
        with span("encode"):
            request = running.resume(answer)
        while request is not None:
            if request.over != "world" and self._group.size() > 1:
                raise InvalidValue(f"over={request.over!r} is not available on this backend; use 'world'")
            self._where = running.where()
            event = Event.of(request, running.bucket, running.phase, self._group.size())
            asked = time.perf_counter()
            with span(f"{event.kind} bucket {event.bucket} phase {event.phase}"):
                answer = perform_on_stream(self._group, request, running.bucket.divisor())
            answered = time.perf_counter()
            with span("decode"):
                request = running.resume(answer)
            decode = 0.0 if request is not None else time.perf_counter() - answered
            # Seconds on the host; the device does the work later, and only a profiler sees it.
            timing = Timing(began, asked - began, 0.0, answered - asked, decode)
            self._listener.heard(replace(event, timing=timing))
            began = answered
        self._where = "idle"

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self._stream

    def drain(self) -> None:
        """Nothing waits on the host; DDP orders its streams after the futures."""
        if self.check.on:  # but for this: whether the step counts must be known before the next one
            self.check.agreed = self.check.seen

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    def forget_failure(self) -> None:
        self._failure = None

    def where(self) -> str:
        return self._where

    def close(self) -> None:
        self._group = None

    def leave(self) -> None:
        self.close()
