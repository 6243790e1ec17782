"""Counts bytes, seconds and steps of one attachment, as one flat dict for any logger."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import Note
from ..core.events import DeviceTimes, Event, StepTimes
from ..errors import GradlaneError, RanksDisagree
from ..log import log
from .sink import Observer, RunInfo, Sink

Figures = dict[str, "Tensor | float"]

COUNTED = (
    "steps",
    "skipped",  # steps; see ``nonfinite`` of ``attach``
    "collectives",
    "bytes_raw",
    "bytes_payload",
    "bytes_wire",
    "bytes_dense",  # that plain all-reduces of the same gradients would send
    "seconds",
    "queued_seconds",
    "encode_seconds",
    "decode_seconds",
    "exposed_seconds",
    "overflow",
    "overflow_sum",
    "underflow",
)
GAUGES = {"residual_norm": 0.0}  # of the last step; see ``note``
SQUARE = "_square"


class Ledger:
    """Sums what a lane reports. One lane writes; any thread may read."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self.observed = bool(observers)
        self._sinks = [observer for observer in observers if isinstance(observer, Sink)]
        self._totals: Figures = dict.fromkeys(COUNTED, 0)
        self._before: Figures = dict(self._totals)  # totals at the begin of the last complete step
        self._after: Figures = dict(self._totals)  # and at its end
        self._unfinished = False  # all buckets of a step came in, and step_ended was not called
        self._lock = threading.Lock()
        self._paused = False

    @contextmanager
    def opening(self, run: RunInfo) -> Iterator[str]:
        """Open the sinks. It yields "ready", or the error here, for the ranks to compare.

        The error is raised at the end, when the other ranks know of it.
        """
        try:
            for sink in self._sinks:
                sink.opened(run)
        except (OSError, GradlaneError) as error:
            self.close()
            if run.world > 1:
                with suppress(RanksDisagree):  # the notes differ, because the rank is in them
                    yield f"rank {run.rank}: {type(error).__name__}: {error}"
            raise
        try:
            yield "ready"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count: what is sent here measures the link, and carries no gradient."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def on_event(self, event: Event) -> None:
        if self._paused:
            return
        totals = self._totals
        totals["collectives"] += 1
        totals["bytes_payload"] += event.payload_bytes
        totals["bytes_wire"] += event.wire_bytes
        if (timing := event.timing) is not None:
            totals["seconds"] += timing.collective
            totals["queued_seconds"] += timing.queued
            totals["encode_seconds"] += timing.encode
            totals["decode_seconds"] += timing.decode
        for observer in self._observers:
            observer(event)

    def on_device_times(self, times: DeviceTimes) -> None:
        """What the step that is about to end took on a device; only devices have these figures."""
        if self._paused:
            return
        found = {
            "device_seconds": sum(request.collective for request in times.requests),
            "device_encode_seconds": sum(request.encode for request in times.requests),
            "device_decode_seconds": sum(request.decode for request in times.requests),
            "device_exposed_seconds": times.exposed,
        }
        for name, seconds in found.items():
            self._totals[name] = self._totals.get(name, 0) + seconds
        for sink in self._sinks:
            self._notify(sink, partial(sink.device_timed, times), times.step)

    def on_note(self, bucket: Bucket, note: Note) -> None:
        with self._lock:  # the hook's thread and the lane's thread may call it at the same time
            for name, value in note.figures.items():
                amount = value.detach() if isinstance(value, Tensor) else value
                self._totals[name] = self._totals.get(name, 0) + amount

    def gradient(self, raw_bytes: int, dense_wire_bytes: int, last: bool) -> None:
        """Count a bucket: its size, and the bytes that a plain all-reduce of it would send."""
        if self._unfinished:
            self._close_step()  # a rank in join() has no backward that ends its steps
        self._unfinished = last
        self._totals["bytes_raw"] += raw_bytes
        self._totals["bytes_dense"] += dense_wire_bytes
        self._totals["steps"] += last

    def sent_elsewhere(self, payload_bytes: int, wire_bytes: int) -> None:
        """Count what DDP has sent without a hook, of which there are no events."""
        self._totals["bytes_payload"] += payload_bytes
        self._totals["bytes_wire"] += wire_bytes

    def step_passed(self) -> None:
        """The end of a step without a strategy."""
        self._close_step()

    def skipped(self) -> None:
        """Count the step that is about to end as skipped."""
        self._totals["skipped"] += 1

    def step_ended(self, times: StepTimes) -> None:
        self._totals["exposed_seconds"] += times.exposed
        self._close_step()
        for sink in self._sinks:
            self._notify(sink, partial(sink.step_ended, times), times.step)

    def _notify(self, sink: Sink, call: Callable[[], None], step: int) -> None:
        """An error is only logged. All ranks have done the step: if one raised now, the others would wait for
        it in the next."""
        if sink not in self._observers:
            return
        try:
            call()
        except Exception:  # noqa: BLE001  user code may raise anything
            self._observers = [observer for observer in self._observers if observer is not sink]
            log.exception("%r raised at the end of step %d; it gets no more events", sink, step)

    def _close_step(self) -> None:
        self._before, self._after = self._after, dict(self._totals)
        self._unfinished = False

    def totals(self) -> dict[str, float]:
        """For a checkpoint: what was counted, but for what is not finite."""
        counted = {name: float(value) for name, value in self._totals.items()}
        return {name: value for name, value in counted.items() if math.isfinite(value)}

    def go_on(self, totals: Mapping[str, float]) -> None:
        """Count on from what a run had counted when it was saved."""
        for name, value in totals.items():
            for figures in (self._totals, self._before, self._after):
                figures[name] = figures.get(name, 0) + value

    def metrics(self) -> dict[str, float]:
        """Totals as ``comm/name``; what the last complete step added as ``comm/step/name``."""
        # Only now: on a device these are kernels, of whoever asks.
        step = {name: value - self._before.get(name, 0) for name, value in self._after.items()}
        return {**_named(self._totals, "comm/"), **_named(step, "comm/step/"), **_gauges(step)}


def _gauges(step: Figures) -> dict[str, float]:
    found = {
        name.removesuffix(SQUARE) + "_norm": math.sqrt(max(0.0, float(value)))
        for name, value in step.items()
        if name.endswith(SQUARE)
    }
    return {f"comm/{name}": value for name, value in (GAUGES | found).items()}


def _named(figures: Figures, prefix: str) -> dict[str, float]:
    shown = {
        name: float(value) if isinstance(value, Tensor) else value
        for name, value in figures.items()
        if name != "bytes_dense" and not name.endswith(SQUARE)
    }
    wire = figures["bytes_wire"]
    shown["ratio"] = float(figures["bytes_dense"] / wire) if wire else 1.0
    return {prefix + name: value for name, value in shown.items()}
