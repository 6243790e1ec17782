"""One performed request, and what it costs on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from .bucket import Bucket
from .collectives import Kind, Op, Request, Scope


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
