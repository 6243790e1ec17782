"""The page's section on a bench document: a table, bars and timelines for each link and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import bars, timeline
from .arm_styles import ArmStyle
from .csv_link import csv_link
from .documents import FAILED, Bench, BenchResult, RankStep
from .number_format import byte_size, duration, seconds_column, share, times
from .phase_bars import phase_bars, phase_csv
from .table import Row, Table, status_row

IDLE = "Noop()"  # compute alone: the upper limit of any speed-up, too large for the scale of the bars


@dataclass(frozen=True)
class Timeline:
    arm: ArmStyle
    summary: str
    ranks: Sequence[tuple[str, str]]  # a heading and a drawing


@dataclass(frozen=True)
class Group:
    """All arms on one link with one number of ranks."""

    heading: str
    where: str
    note: str
    table: Table
    speedups: Sequence[bars.DrawnBar]
    speedups_csv: str
    ceiling: str
    phases: Sequence[bars.DrawnBar]
    phases_csv: str
    timelines: Sequence[Timeline]


@dataclass(frozen=True)
class BenchSection:
    overview: Table | None
    groups: Sequence[Group]


def bench_section(bench: Bench, arms: Mapping[str, ArmStyle]) -> BenchSection:
    grouped: dict[tuple[str, str], list[BenchResult]] = {}
    for result in bench.results:
        grouped.setdefault((result.link, _ranks(result)), []).append(result)
    groups = [_group(results, arms) for results in grouped.values()]
    overview = _overview(grouped, arms) if len(groups) > 1 else None
    return BenchSection(overview, groups)


def _overview(
    grouped: Mapping[tuple[str, str], Sequence[BenchResult]], arms: Mapping[str, ArmStyle]
) -> Table:
    found = {
        (result.arm, key): times(result.speedup) if result.status not in FAILED else result.status
        for key, results in grouped.items()
        for result in results
    }
    names = dict.fromkeys(name for name, _ in found)
    counts = {ranks for _, ranks in grouped}
    one = f", {next(iter(counts))}" if len(counts) == 1 else ""
    return Table(
        caption=f"Speed-up over DDP without a hook{one}",
        headings=[link if one else f"{link}, {ranks}" for link, ranks in grouped],
        rows=[
            Row(arms[name], "", "", [found.get((name, key), times(None)) for key in grouped])
            for name in names
        ],
    )


def _group(results: Sequence[BenchResult], arms: Mapping[str, ArmStyle]) -> Group:
    first = results[0]
    drawable = [result for result in results if result.status not in FAILED]
    spent = [(result.arm, result.phases, result.exposed_s) for result in drawable if result.arm != IDLE]
    idle = next((result.speedup for result in drawable if result.arm == IDLE), None)
    return Group(
        heading=f"{first.link}, {_ranks(first)}",
        where=first.where,
        note="\n".join(dict.fromkeys(result.note for result in results if result.note)),
        table=_table(results, arms),
        speedups=_speedups(drawable, arms),
        speedups_csv=csv_link(("arm", "speed-up"), [(result.arm, result.speedup) for result in drawable]),
        ceiling=f"Compute alone, {IDLE}, is at {times(idle)}: no strategy can be faster." if idle else "",
        phases=phase_bars(spent, arms),
        phases_csv=phase_csv(spent),
        timelines=[_timeline(result.timeline, arms[result.arm]) for result in drawable if result.timeline],
    )


def _ranks(result: BenchResult) -> str:
    if not result.nodes:
        return _counted(result.ranks)
    return f"{result.nodes} nodes of {_counted(result.ranks // result.nodes)}"


def _counted(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _table(results: Sequence[BenchResult], arms: Mapping[str, ArmStyle]) -> Table:
    headings: list[str] = []
    columns: list[list[str]] = []
    for heading, key in (
        ("median", "median_s"),
        ("min", "min_s"),
        ("CPU", "cpu_s"),
        ("exposed", "exposed_s"),
    ):
        unit, texts = seconds_column(getattr(result, key) for result in results)
        headings.append(f"{heading}, {unit}")
        columns.append(texts)
    of_nodes = bool(results[0].nodes)
    at_node = results[0].interface_of == "node"
    over_hsdp = any(result.speedup_hsdp is not None for result in results)
    for heading, key, form, shown in (
        ("sent, ledger", "ledger_bytes", byte_size, True),
        ("a node across", "uplink_bytes", byte_size, of_nodes),
        (f"{'a node' if at_node else 'sent'}, interface", "interface_bytes", byte_size, True),
        ("speed-up", "speedup", times, True),
        ("over hsdp", "speedup_hsdp", times, over_hsdp),
        ("of the limit", "of_limit", share, True),
    ):
        if not shown:
            continue
        headings.append(heading)
        columns.append([form(getattr(result, key)) for result in results])
    rows = [
        status_row(arms[result.arm], result.status, result.detail, cells)
        for result, cells in zip(results, zip(*columns, strict=True), strict=True)
    ]
    return Table(f"One step on {results[0].link}, {_ranks(results[0])}", headings, rows)


def _speedups(results: Sequence[BenchResult], arms: Mapping[str, ArmStyle]) -> list[bars.DrawnBar]:
    found = []
    for result in results:
        speedup = result.speedup
        if speedup is not None and result.arm != IDLE:
            arm = arms[result.arm]
            found.append(bars.Bar(arm, [(arm.style, max(0.0, speedup))], times(speedup)))
    return bars.draw(found, "Speed-up over DDP without a hook", mark=1.0)


def _timeline(steps: Sequence[RankStep], arm: ArmStyle) -> Timeline:
    seconds = timeline.length(steps)
    ranks = [(f"rank {step.rank}, step {step.step}", timeline.draw(step, seconds)) for step in steps]
    return Timeline(arm, duration(seconds), ranks)
