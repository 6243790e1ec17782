"""The lane for backends whose collectives run on the device: no thread, a side stream."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.events import Event, Timing
from ..core.running import Running
from ..core.strategy import Strategy
from ..errors import InvalidValue
from .base import Finish, Listener, completed_future, same
from .perform import perform_on_stream
from .span import span


class StreamLane:
    """Drives the strategy to its end inside the hook; ``wait`` orders streams and does not block.

    On DDP's own group: NCCL and XCCL run collectives in the order of issue. Only ``over="world"``.
    """

    def __init__(self, group: Any, device: torch.device, listener: Listener) -> None:
        self._group = group
        self._listener = listener
        self._device = device
        self._stream = torch.Stream(device) if device.type in ("cuda", "xpu") else None
        self._failure: BaseException | None = None
        self._where = "idle"

    @torch.no_grad()
    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, loud: bool = False
    ) -> Future[Tensor]:
        running = Running(strategy, bucket, self._listener.noted)
        with self._on_stream():
            try:
                mean = self._driven(running)
            except Exception as error:
                running.close()
                if loud:
                    raise
                self._failure = error
                return completed_future(finish(bucket.flat))
            future: Future[Tensor] = Future(devices=[self._device] if self._stream else [])
            future.set_result(finish(mean))  # records an event on the side stream; DDP's stream waits for it
            return future

    def _driven(self, running: Running) -> Tensor:
        began = time.perf_counter()
        with span("encode"):
            request = running.resume()
        while request is not None:
            if request.over != "world":
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
        assert running.reduced is not None
        self._where = "idle"
        return running.reduced.mean

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self._stream

    def drain(self) -> None:
        """Nothing waits on the host; DDP orders its streams after the futures."""

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    def forget_failure(self) -> None:
        self._failure = None

    def where(self) -> str:
        return self._where

    def close(self) -> None:
        self._group = None
