"""The progress and the table of ``gradlane bench`` in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..bench.bench_setting import StepProgress
from ..report.verdict import verdict_of_record
from .arm_labels import labels

Column = tuple[str, Callable[[dict[str, Any]], str]]
COLUMNS: tuple[Column, ...] = (
    ("median\nms", lambda row: _ms(row["median_s"])),
    ("min\nms", lambda row: _ms(row["min_s"])),
    ("CPU\nms", lambda row: _ms(row["cpu_s"])),
    ("exposed\nms", lambda row: _ms(row["exposed_s"])),
    ("ledger\nMB", lambda row: _mb(row["ledger_bytes"])),
    ("interface\nMB", lambda row: _mb(row["interface_bytes"])),
    ("speed-up\nx ddp", lambda row: _times(row["speedup"])),
    ("of\nlimit", lambda row: _times(row["of_limit"])),
)
FIGURES_WIDTH = 62  # of all columns but the first
ACROSS: Column = ("across\nMB", lambda row: _mb(row["uplink_bytes"]))
COUNTED: Column = ("inter-\nface MB", lambda row: _mb(row["interface_bytes"]))
OVER_HSDP: Column = ("\nx hsdp", lambda row: _times(row["speedup_hsdp"]))
LEGEND = """\
median, min: one step, from the first rank's start to the last rank's end   CPU: time of one rank
exposed: communication time after backward's compute   speed-up: over ddp without a hook
ledger: bytes that one rank sends in a step   interface: the same, counted there with all headers
of limit: the larger of compute (Noop) and the ledger's bytes at the link's rate, over the median"""
LEGEND_OF_NODES = """\
median: one step, from the first rank's start to the last rank's end   CPU: time of one rank
exposed: communication time after backward's compute; not known for hsdp, which communicates inside it
across: bytes that all ranks of a node send to other nodes in a step
interface: {interface}
speed-up: over ddp without a hook, and over torch's own hsdp
of limit: the larger of compute (Noop) and the bytes across at the link's rate, over the median"""
INTERFACE_OF = {
    "node": "the same, counted at the node with all headers",
    "rank": "all bytes that one rank sends, also within its node, counted on loopback with all headers",
}


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[StepProgress], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=total)

        def show(at: StepProgress) -> None:
            step = f"step {at.step}" if at.step >= 0 else "warm-up"
            text = f"{at.link}, {at.ranks} ranks, {escape(at.arm)}, {step}"
            progress.update(task, completed=at.number, description=text)

        yield show


def print_record(record: dict[str, Any]) -> None:
    console = Console()
    settings = record["settings"]
    for (link, rate, _), group in groupby(
        record["results"], key=lambda row: (row["link"], row["rate_bits"], row["ranks"])
    ):
        rows = list(group)
        between = link if rate else f"{link}, unshaped"
        names, legend = labels([row["arm"] for row in rows], console.width - FIGURES_WIDTH)
        console.print(_table(f"{settings['model']}, {_ranks(rows[0])}, {between}", rows, names))
        for line in legend:
            console.print(line, markup=False, highlight=False)
        if rows[0]["note"]:
            console.print(escape(rows[0]["note"]))
        for row in rows:
            if row["detail"]:
                console.print(escape(f"{row['arm']}: {row['status']}: {row['detail']}"), highlight=False)
    console.print(_legend(record["results"]), style="dim", highlight=False)
    for sentence in verdict_of_record(record):
        console.print(sentence, style="bold", markup=False, highlight=False)
    if record["ended"] == "budget":
        console.print(f"The time budget of {settings['budget_s']:g} s ended the run; --budget sets it.")
    elif record["ended"] == "interrupted":
        console.print("Interrupted: the table shows what was measured until then.")


def _table(title: str, rows: list[dict[str, Any]], names: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("arm", overflow="fold")
    columns = _columns(rows)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in zip(names, rows, strict=True):
        failed = row["status"] in ("crashed", "hung")
        cells = [row["status"]] + [""] * (len(columns) - 1) if failed else [show(row) for _, show in columns]
        table.add_row(escape(name), *cells)
    return table


def _columns(rows: list[dict[str, Any]]) -> tuple[Column, ...]:
    """Those that fit 80 characters; the JSON file has all figures."""
    if rows[0]["nodes"] is None:
        return COLUMNS
    middle, _, cpu, exposed, _, _, speedup, limit = COLUMNS
    over_hsdp = (OVER_HSDP,) if any(row["speedup_hsdp"] is not None for row in rows) else ()
    return (middle, cpu, exposed, ACROSS, COUNTED, speedup, *over_hsdp, limit)


def _legend(rows: list[dict[str, Any]]) -> str:
    if rows[0]["nodes"] is None:
        return LEGEND
    return LEGEND_OF_NODES.format(interface=INTERFACE_OF[rows[0]["interface_of"]])


def _ranks(row: dict[str, Any]) -> str:
    if row["nodes"] is None:
        return f"{row['ranks']} ranks"
    return f"{row['nodes']} nodes of {row['per_node']} rank{'s' if row['per_node'] > 1 else ''}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.{0 if seconds >= 1 else 1}f}"


def _mb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.{1 if size >= 1e8 else 2}f}"
