"""The report of ``gradlane doctor`` in a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..doctor.examine import Report
from ..doctor.finding import Finding
from ..doctor.measure_link import MeasuredLink
from .arm_labels import labels

STYLES = {"fine": "green", "note": "cyan", "costs": "yellow", "broken": "bold red"}
LEGEND = (
    "Sending: by the measured times of collectives. Work: measured here on one matrix. Together: their sum, "
    "without overlap with backward. `gradlane plan` predicts complete steps, `gradlane bench` measures them; "
    "`gradlane train` shows what they do to the loss."
)
FIGURES_WIDTH = 49  # of all columns but the first
WORTH = 1.1  # speed-up over Mean(); less is noise


def print_report(report: Report, rate: str | None) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]gradlane doctor[/bold]: {escape(report.where)}\n")
    console.print(_findings(report.findings))
    if report.link is not None:
        console.print(_link(report.link))
    elif not report.broken:
        console.print("There is one rank only: no link to measure.")
    if report.estimates:
        names, legend = labels([row.strategy for row in report.estimates], console.width - FIGURES_WIDTH)
        console.print(_estimates(report, rate, names))
        for line in legend:
            console.print(line, markup=False)
        console.print(_conclusion(report))
        console.print(LEGEND, style="dim")
    if report.broken:
        count = sum(finding.level == "broken" for finding in report.findings)
        console.print(f"\n[bold red]{count} thing{'s' if count > 1 else ''} broken.[/bold red]")


def _findings(findings: tuple[Finding, ...]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for finding in findings:
        style = STYLES[finding.level]
        who = f"{finding.who}: " if finding.who else ""
        grid.add_row(f"[{style}]{finding.level}[/{style}]", escape(finding.topic), escape(who + finding.what))
        if finding.advice:
            grid.add_row("", "", f"[dim]->[/dim] {escape(finding.advice)}")
    return grid


def _link(link: MeasuredLink) -> str:
    large = f"one that sends {_size(link.largest_bytes)} carries {_rate(link.bytes_per_s)} each way"
    small = f"an all-reduce of 4 KiB takes {_time(link.latency_s)}"
    return f"\n[bold]Between {link.ranks} ranks[/bold], measured: {small}, {large}\n"


def _estimates(report: Report, rate: str | None, names: list[str]) -> Table:
    where = f"a link of {rate}" if rate else "this link"
    title = f"A gradient of {_count(report.parameters)} parameters on {where}, estimated"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("strategy", overflow="fold", min_width=12)
    size = "MB" if report.link is None or report.link.ranks_per_host == 1 else "MB a host"
    for heading in (size, "sending", "work", "together", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = report.estimates[0].seconds
    for name, row in zip(names, report.estimates, strict=True):
        table.add_row(
            escape(name),
            f"{row.uplink_bytes / 1e6:.1f}",
            *(_time(seconds) for seconds in (row.sending_s, row.work_s, row.seconds)),
            f"{plain / row.seconds:.2f}",
            style="" if plain / row.seconds >= WORTH or row is report.estimates[0] else "dim",
        )
    return table


def _conclusion(report: Report) -> str:
    plain, *others = report.estimates
    if all(plain.seconds / row.seconds < WORTH for row in others):
        return "None of them pays on this link: plain DDP is as fast.\n"
    return f"Those with a speed-up of {WORTH:g} or more would pay, if a step waits for its gradients.\n"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms"


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def _rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:g} {unit}"
    return str(parameters)
