"""Where the time of a step went: the phases of its requests, and their order on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.events import Event
from .sample import Sample, Step

PHASES = ("encode", "queued", "collective", "decode")


def phases_of(steps: Sequence[Step]) -> dict[str, float]:
    """Seconds per step and rank in each phase."""
    count = sum(len(step) for step in steps)
    totals = dict.fromkeys(PHASES, 0.0)
    for step in steps:
        for sample in step:
            for event in sample.events:
                for phase in PHASES:
                    totals[phase] += getattr(event.timing, phase)
    return {f"{phase}_s": total / count for phase, total in totals.items()}


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
