"""The figures of an arm, from its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from ..core.events import Event
from .bench_rank import Sample
from .link import Link, framed_bytes

Step = Sequence[Sample]  # one for each rank
PHASES = ("encode", "queued", "collective", "decode")
NO_FIGURES: dict[str, Any] = dict.fromkeys(
    (
        "median_s",
        "min_s",
        "cpu_s",
        "exposed_s",
        "ledger_bytes",
        "framed_bytes",
        "interface_bytes",
        "speedup",
        "limit_s",
        "of_limit",
        "ratio",
        "phases",
        "timeline",
    )
)


def wall(step: Step) -> float:
    """From the first rank's start to the last rank's end."""
    return max(sample.end for sample in step) - min(sample.start for sample in step)


def figures_of(steps: Sequence[Step], emulated: bool) -> dict[str, Any]:
    """The figures of one arm, without comparison."""
    if not steps:
        return {"steps": 0, "steps_s": [], **NO_FIGURES}
    seconds = [wall(step) for step in steps]
    ledger = _mean(steps, lambda sample: sample.ledger_bytes)
    counted = None
    if all(sample.interface_bytes is not None for step in steps for sample in step):
        counted = _mean(steps, lambda sample: sample.interface_bytes or 0)
        if not emulated:
            counted /= len(steps[0])  # all ranks share the loopback interface
    typical = min(steps, key=lambda step: abs(wall(step) - median(seconds)))
    recorded = any(sample.events for step in steps for sample in step)
    return {
        **NO_FIGURES,
        "steps": len(steps),
        "median_s": median(seconds),
        "min_s": min(seconds),
        "cpu_s": median(fmean(sample.cpu for sample in step) for step in steps),
        "exposed_s": median(max(sample.end - sample.computed for sample in step) for step in steps),
        "ledger_bytes": round(ledger),
        "framed_bytes": round(framed_bytes(ledger)),
        "interface_bytes": None if counted is None else round(counted),
        "steps_s": [round(value, 6) for value in seconds],
        "phases": _phases(steps) if recorded else None,
        "timeline": [_timeline(rank, sample, typical) for rank, sample in enumerate(typical)]
        if recorded
        else None,
    }


def compared(
    row: dict[str, Any], link: Link, base: dict[str, Any] | None, compute: dict[str, Any] | None
) -> dict[str, Any]:
    """Add the comparison with DDP without a hook, and with the least time that compute and link allow."""
    median_s = row["median_s"]
    if median_s is None:
        return row
    if base is not None and base["median_s"] is not None:
        row["speedup"] = base["median_s"] / median_s
        row["ratio"] = base["ledger_bytes"] / row["ledger_bytes"] if row["ledger_bytes"] else None
    if compute is not None and compute["median_s"] is not None:
        row["limit_s"] = max(compute["median_s"], link.seconds(row["ledger_bytes"]))
        row["of_limit"] = row["limit_s"] / median_s
    return row


def _mean(steps: Sequence[Step], figure: Callable[[Sample], float]) -> float:
    return fmean(figure(sample) for step in steps for sample in step)


def _phases(steps: Sequence[Step]) -> dict[str, float]:
    """Seconds per step and rank in each phase."""
    count = sum(len(step) for step in steps)
    totals = dict.fromkeys(PHASES, 0.0)
    for step in steps:
        for sample in step:
            for event in sample.events:
                for phase in PHASES:
                    totals[phase] += getattr(event.timing, phase)
    return {f"{phase}_s": total / count for phase, total in totals.items()}


def _timeline(rank: int, sample: Sample, step: Step) -> dict[str, Any]:
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
