"""Where the time of a step went: the phases of its requests, and their order on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.events import Event
from .sample import Sample, Step

PHASES = ("encode", "queued", "collective", "decode")


def phases_of(steps: Sequence[Step]) -> dict[str, float]:
    """Seconds per step and rank in each phase."""
    samples = [sample for step in steps for sample in step]
    found = [phase_seconds(sample.events) for sample in samples]
    return {f"{phase}_s": sum(seconds[phase] for seconds in found) / len(found) for phase in PHASES}


def phase_seconds(events: Iterable[Event]) -> dict[str, float]:
    """The sum over requests, in each phase; those of DDP itself, which ``Auto`` takes too, are not known."""
    timings = [event.timing for event in events if event.timing is not None]
    return {phase: sum(getattr(timing, phase) for timing in timings) for phase in PHASES}


def timeline_of(step: Step) -> list[dict[str, Any]]:
    """When each rank's requests ran in this step."""
    return [_of_rank(rank, sample, step) for rank, sample in enumerate(step)]


def _of_rank(rank: int, sample: Sample, step: Step) -> dict[str, Any]:
    start = min(other.start for other in step)
    return {
        "rank": rank,
        "step": sample.events[0].step if sample.events else 0,
        "backward_s": round(sample.computed - start, 6),
        "end_s": round(sample.end - start, 6),
        "requests": [_request(event, start) for event in sample.events],
    }


def _request(event: Event, start: float) -> dict[str, Any]:
    assert event.timing is not None
    parts = {f"{phase}_s": round(getattr(event.timing, phase), 6) for phase in PHASES}
    return {
        "bucket": event.bucket,
        "phase": event.phase,
        "kind": event.kind,
        "payload_bytes": event.payload_bytes,
        "start_s": round(event.timing.began - start, 6),
        **parts,
    }
