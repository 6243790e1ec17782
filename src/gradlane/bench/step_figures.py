"""The figures of an arm, from its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from .hosts import Hosts
from .link import Link, framed_bytes
from .nodes import Nodes
from .sample import Sample, Step
from .step_timeline import phases_of, timeline_of

NO_FIGURES: dict[str, Any] = dict.fromkeys(
    (
        "median_s",
        "min_s",
        "cpu_s",
        "exposed_s",
        "ledger_bytes",
        "uplink_bytes",
        "framed_bytes",
        "interface_bytes",
        "speedup",
        "speedup_hsdp",
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


def figures_of(steps: Sequence[Step], hosts: Hosts, nodes: Nodes | None) -> dict[str, Any]:
    """The figures of one arm, without comparison."""
    if not steps:
        return {"steps": 0, "steps_s": [], **NO_FIGURES}
    seconds = [wall(step) for step in steps]
    ledger = _mean(steps, lambda sample: sample.ledger_bytes)
    uplink = None if nodes is None else _mean(steps, lambda sample: sample.uplink_bytes)
    counted = _counted(steps, hosts)
    on_interface = uplink if uplink is not None and hosts.emulated else ledger
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
        "uplink_bytes": None if uplink is None else round(uplink),
        "framed_bytes": round(framed_bytes(on_interface)),
        "interface_bytes": None if counted is None else round(counted),
        "steps_s": [round(value, 6) for value in seconds],
        "phases": phases_of(steps) if recorded else None,
        "timeline": timeline_of(typical) if recorded else None,
    }


def compared(
    row: dict[str, Any],
    link: Link,
    base: dict[str, Any],
    compute: dict[str, Any],
    hsdp: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Add the comparison with DDP without a hook, with the least time that compute and link allow, and for
    arms on HSDP with ``hsdp``, which is torch's own."""
    median_s = row["median_s"]
    if median_s is None:
        return row
    if base["median_s"] is not None:
        row["speedup"] = base["median_s"] / median_s
        row["ratio"] = base["ledger_bytes"] / row["ledger_bytes"] if row["ledger_bytes"] else None
    if hsdp is not None and hsdp["median_s"] is not None:
        row["speedup_hsdp"] = hsdp["median_s"] / median_s
    if compute["median_s"] is not None:
        on_link = row["ledger_bytes"] if row["uplink_bytes"] is None else row["uplink_bytes"]
        row["limit_s"] = max(compute["median_s"], link.seconds(on_link))
        row["of_limit"] = row["limit_s"] / median_s
    return row


def _counted(steps: Sequence[Step], hosts: Hosts) -> float | None:
    """Bytes that an emulated host sent in a step, by its interface. On loopback, which all ranks share, those
    of a rank."""
    sums = []
    for step in steps:
        for first in range(0, len(step), hosts.per_host):
            here = step[first : first + hosts.per_host]
            counters = [sample.counter for sample in here if sample.counter is not None]
            if len(counters) < len(here):
                return None
            before, after = min(before for before, _ in counters), max(after for _, after in counters)
            sums.append((after - before) / here[0].period)
    return fmean(sums) if hosts.emulated else fmean(sums) / hosts.per_host


def _mean(steps: Sequence[Step], figure: Callable[[Sample], float]) -> float:
    return fmean(figure(sample) for step in steps for sample in step)
