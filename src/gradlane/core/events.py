"""One performed request: what it costs on the wire, and where its time went; and who listens."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Protocol, cast

from .bucket import Bucket, Layout
from .collectives import Kind, Note, Op, Request, Scope


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one request, in the order in which they pass; only a lane measures them.

    The lane waits for requests one after the other. While it waits for an earlier request, a request is
    ``queued``, though the backend may already work on it; ``collective`` is the wait that remains after that.
    So the collective seconds of a step never count a moment twice.
    """

    began: float
    """When the strategy began its work on this request, by ``time.perf_counter``."""
    encode: float
    """The strategy's own work up to the request."""
    queued: float
    collective: float
    decode: float
    """The strategy's own work after its last answer; 0 for the requests before that."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step's first bucket was ready, backward had computed all gradients, and the lane was idle."""

    step: int
    ready: float
    computed: float
    ended: float

    @property
    def exposed(self) -> float:
        """Seconds of communication that backward could not hide."""
        return self.ended - self.computed


@dataclass(frozen=True, slots=True)
class DeviceTiming:
    """What one request took on a device, in seconds by events on the lane's stream.

    The host calls kernels and goes on, so a ``Timing`` says there what the calls took. ``collective``
    includes the wait for the ranks that come later.
    """

    bucket: int
    phase: int
    kind: Kind
    began: float
    """When the device began the strategy's work on it, by the clock of ``Timing.began``: an estimate."""
    encode: float
    collective: float
    decode: float


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """What one step took on a device; known when the host has waited for the end of the step."""

    step: int
    requests: tuple[DeviceTiming, ...]
    computed: float
    """When the device had computed all gradients; an estimate, as ``DeviceTiming.began`` is."""
    ended: float
    """When all ranks had agreed on the step."""

    @property
    def exposed(self) -> float:
        """Seconds of communication that backward could not hide."""
        return max(0.0, self.ended - self.computed)


@dataclass(frozen=True, slots=True)
class Event:
    """What telemetry, planner and tests read; the same in a dry run, a simulation and a real run."""

    step: int
    bucket: int
    phase: int
    kind: Kind
    op: Op | None
    over: Scope
    payload_elements: int
    payload_bytes: int
    wire_bytes: int
    parameters: tuple[str, ...] = ()
    timing: Timing | None = field(default=None, compare=False)

    @classmethod
    def of(cls, request: Request, bucket: Bucket, phase: int, size: int) -> Event:
        elements, payload = request.size()
        sent = wire_bytes(request.kind, payload, size)
        return cls(
            bucket.step, bucket.index, phase, request.kind, request.op, request.over,
            elements, payload, sent, cast(Layout, bucket.layout).names,
        )  # fmt: skip


class Listener(Protocol):
    """Is called for every performed request, on the lane: so it must be quick."""

    @property
    def observed(self) -> bool:
        """Whether anybody wants to know more than totals."""

    def on_event(self, event: Event) -> None: ...
    def on_note(self, bucket: Bucket, note: Note) -> None: ...
    def on_device_times(self, times: DeviceTimes) -> None: ...


class WeakListener:
    """Calls a listener for as long as it exists.

    The lane's thread keeps the lane alive. It must not keep the listener alive: observers may refer to the
    model, and the lane ends when its model is dropped.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)

    @property
    def observed(self) -> bool:
        listener = self._listener()
        return listener is not None and listener.observed

    def on_event(self, event: Event) -> None:
        if (listener := self._listener()) is not None:
            listener.on_event(event)

    def on_note(self, bucket: Bucket, note: Note) -> None:
        if (listener := self._listener()) is not None:
            listener.on_note(bucket, note)

    def on_device_times(self, times: DeviceTimes) -> None:
        if (listener := self._listener()) is not None:
            listener.on_device_times(times)


def wire_bytes(kind: Kind, payload_bytes: int, size: int) -> int:
    """Bytes one of ``size`` ranks puts on the link, headers aside.

    All-reduce (ring or halving-doubling) sends 2(n-1)/n of the payload, an all-gather sends it to
    every other rank, an all-to-all and a reduce-scatter keep 1/n of it at home.
    """
    if kind == "all_reduce":
        return round(2 * (size - 1) * payload_bytes / size)
    if kind == "all_gather":
        return (size - 1) * payload_bytes
    return round((size - 1) * payload_bytes / size)
