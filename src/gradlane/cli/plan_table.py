"""The plan in a terminal: what each strategy would do, and at which links it pays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..report.verdict import verdict_of_record
from .arm_labels import labels

STYLES = {"pays": "green", "even": "", "loses": "red", "": ""}
FIGURES_WIDTH = 62  # of all columns but the names
CELL_WIDTH = 26  # of one number of ranks
LEGEND = """\
step: forward and backward with all communication   x ddp: speed-up over DDP without a hook
pays: gains more than {twice:.0%}, twice the error of a forecast; even: neither gains nor loses more
loses: what it adds to DDP most of: its own work, bytes on the link, or latency
pays below: the rate of the link under which it pays, if nothing else changes
loss: what it loses of a gradient; `gradlane bench` measures the step, `gradlane train` the loss"""


def print_plan(record: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(_title(record))
    if record["note"]:
        console.print(escape(record["note"]))
    names, legend = labels([row["arm"] for row in record["results"]], console.width - FIGURES_WIDTH)
    console.print(_table(record, names))
    for table in _more_ranks(record, names, console.width):
        console.print(table)
    for line in legend:
        console.print(line, markup=False)
    console.print(LEGEND.format(twice=2 * record["error"]), style="dim")
    for sentence in verdict_of_record(record):
        console.print(sentence, style="bold", markup=False)


def _title(record: dict[str, Any]) -> str:
    settings = record["settings"]
    nodes = f", {settings['per_node']} on each node" if settings["per_node"] > 1 else ""
    between = f"{_rate(record['rate_bits'])}, {_time(record['latency_s'])} for a small all-reduce"
    found = f", from {settings['from']}"
    if record["ddp_s"] is not None:
        found += f"; a step of DDP took {_time(record['ddp_s'])}, so forecasts are taken to be off by "
        found += f"{record['error']:.0%}"
    return (
        f"[bold]{escape(str(settings['model']))}[/bold], {settings['parameters']:,} parameters, "
        f"{record['ranks']} ranks{nodes}: {between}\n"
        f"compute alone {_time(record['compute_s'])}{found}"
    )


def _table(record: dict[str, Any], names: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("strategy", overflow="fold")
    of = "MB a\nnode" if record["settings"]["per_node"] > 1 else "MB a\nrank"
    for heading in (of, "step\nms", "x ddp"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("loss", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("pays below", justify="right", no_wrap=True)
    for name, row in zip(names, record["results"], strict=True):
        table.add_row(
            escape(name),
            f"{row['node_bytes'] / 1e6:.1f}",
            f"{row['seconds'] * 1e3:.4g}",
            f"{row['speedup']:.2f}",
            row["loss"],
            escape(row["verdict"] + (f": {row['why']}" if row["why"] else "")),
            _below(row),
            style=STYLES[row["verdict"]],
        )
    return table


def _below(row: dict[str, Any]) -> str:
    if not row["verdict"]:
        return ""
    if row["pays_at_any_rate"]:
        return "any rate"
    return "no rate" if row["pays_below_bits"] is None else _rate(row["pays_below_bits"])


def _more_ranks(record: dict[str, Any], names: list[str], width: int) -> Iterator[Table]:
    """As many numbers of ranks side by side as fit."""
    by_ranks = {n: list(rows) for n, rows in groupby(record["more_ranks"], key=lambda row: row["ranks"])}
    worlds = list(by_ranks)
    abreast = max(1, (width - max(map(len, names))) // CELL_WIDTH)
    for first in range(0, len(worlds), abreast):
        shown = worlds[first : first + abreast]
        table = Table(
            title="More ranks, extrapolated: x ddp, step in ms and its band", title_justify="left",
            title_style="bold", box=SIMPLE_HEAD, pad_edge=False,
        )  # fmt: skip
        table.padding = (0, 1, 0, 0)
        table.add_column("strategy", overflow="fold")
        for ranks in shown:
            table.add_column(f"{ranks} ranks", justify="right", no_wrap=True)
        for index, name in enumerate(names):
            table.add_row(escape(name), *(_cell(by_ranks[ranks][index]) for ranks in shown))
        yield table


def _cell(row: dict[str, Any]) -> str:
    low, high = row["low_s"] * 1e3, row["high_s"] * 1e3
    return f"{row['speedup']:.2f}  {row['seconds'] * 1e3:.4g} ({low:.4g}-{high:.4g})"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
