"""One performed request: what it costs on the wire, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, field

from .bucket import Bucket
from .collectives import Kind, Op, Request, Scope


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one request, in the order in which they pass; only a lane can tell them.

    The lane waits for requests one after the other. While it waits for an earlier one, a request is
    ``queued``, though the backend may be at work on it already; ``collective`` is what was left to
    wait for then. So the collective seconds of a step never count a moment twice.
    """

    began: float
    """When the strategy turned to this request, by ``time.perf_counter``."""
    encode: float
    """The strategy's own work up to the request."""
    queued: float
    collective: float
    decode: float
    """The strategy's own work after its last answer; 0 for the requests before that."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step's first bucket was ready, backward had computed all, and the lane was done."""

    step: int
    ready: float
    computed: float
    ended: float

    @property
    def exposed(self) -> float:
        """Seconds of communication that backward could not hide."""
        return self.ended - self.computed


@dataclass(frozen=True, slots=True)
class Event:
    """What telemetry, planner and tests read; equal in a dry run, a simulation and a real run."""

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
            elements, payload, sent, bucket.names,
        )  # fmt: skip


def wire_bytes(kind: Kind, payload_bytes: int, size: int) -> int:
    """Bytes one of ``size`` ranks puts on the link, headers aside.

    All-reduce (ring or halving-doubling) sends 2(n-1)/n of the payload, an all-gather sends it to
    every other rank, an all-to-all keeps 1/n of it at home.
    """
    if kind == "all_reduce":
        return round(2 * (size - 1) * payload_bytes / size)
    if kind == "all_gather":
        return (size - 1) * payload_bytes
    return round((size - 1) * payload_bytes / size)
