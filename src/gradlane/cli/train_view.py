"""The progress and the table of ``gradlane train`` in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from ..report.number_format import DASH, byte_size, plain, seconds_column, signed
from ..report.verdict import verdict_of_record
from ..train.seed_training import ArmProgress
from ..train.tasks import UNITS
from ..train.train_plan import TUNING_SEED, TrainPlan
from .arm_labels import labels

REDRAW_SECONDS = 0.2
WIDTH = 110  # of output to a file or a pipe
FIGURES_WIDTH, RATE_WIDTH = 67, 8  # of the table's other columns


def console() -> Console:
    made = Console()
    return made if made.is_terminal else Console(width=WIDTH)


class ProgressLines:
    """A line for each arm: steps, time, seed or rate, held-out loss. Call it with every ``ArmProgress``."""

    def __init__(self, plan: TrainPlan, screen: Console) -> None:
        # No thread redraws it: a fork of the ranks would copy the locks that the thread holds.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            BarColumn(bar_width=10),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[remark]}"),
            console=screen,
            auto_refresh=False,
        )
        self._plan, self._drawn = plan, 0.0
        total = plan.steps * (len(plan.tuned_rates) + plan.seeds)
        self._lines = {arm: self._progress.add_task(arm, total=total, remark="") for arm in plan.all_arms}

    def __enter__(self) -> ProgressLines:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, progress: ArmProgress) -> None:
        line = self._lines[progress.arm]
        if progress.status in ("ok", "partial", "diverged"):
            completed = runs_before(self._plan, progress) * self._plan.steps + progress.step
            self._progress.update(line, completed=completed)
        self._progress.update(line, remark=doing(self._plan, progress))
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._progress.refresh()
            self._drawn = time.monotonic()


def runs_before(plan: TrainPlan, progress: ArmProgress) -> int:
    """How many runs every arm has before this one: first those of the tuning, then the seeds."""
    if progress.seed == TUNING_SEED:
        return plan.tuned_rates.index(progress.rate)
    return len(plan.tuned_rates) + progress.seed


def doing(plan: TrainPlan, progress: ArmProgress) -> str:
    """What an arm does now: the seed or the rate to be tuned, the last loss, the status if it is bad."""
    loss = "" if progress.loss is None else f"{progress.loss:.3f} {UNITS[plan.task]}"
    status = "" if progress.status in ("ok", "partial") else f"  {progress.status}"
    if progress.seed == TUNING_SEED:
        return f"tuning at {progress.rate:g}  {loss}{status}"
    seed = f"seed {progress.seed + 1} of {plan.seeds}" if plan.seeds > 1 else ""
    rate = f"at {progress.rate:g}" if plan.tuned_rates else ""
    which = " ".join(part for part in (seed, rate) if part)
    return f"{which}  {loss}{status}" if which else f"{loss}{status}"


def print_document(document: dict[str, Any], screen: Console) -> None:
    """The table of a train document, what it says in words, and what did not go as planned."""
    names = [result["arm"] for result in document["results"]]
    tuned = any(result["tuning"] for result in document["results"])
    shown, legend = labels(names, screen.width - FIGURES_WIDTH - tuned * RATE_WIDTH)
    screen.print(table(document, shown))
    for line in legend:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    for remark in remarks(document):
        screen.print(remark, markup=False, highlight=False, soft_wrap=True)
    for sentence in verdict_of_record(document):
        screen.print(sentence, style="bold", markup=False, highlight=False, soft_wrap=True)


def table(document: dict[str, Any], names: Sequence[str] | None = None) -> Table:
    """The table of a train document; figures that were not measured are dashes. ``names`` of its arms."""
    results, target = document["results"], document["target"]
    step_unit, step_times = seconds_column(result["seconds_per_step"] for result in results)
    goal = "to target" if target is None else f"to {plain(target, 4)}"
    made = Table(box=SIMPLE_HEAD, title=_title(document), title_justify="left", pad_edge=False)
    made.add_column("arm", overflow="fold")
    made.add_column("status")
    tuned = any(result["tuning"] for result in results)
    if tuned:
        made.add_column("best\nrate", justify="right", no_wrap=True)
    for heading in (
        f"final\n{document['unit']}",
        "gap to\ndense",
        "sent per\nstep",
        f"{step_unit} per\nstep",
        f"{goal}:\nseconds",
        f"{goal}:\nsent",
    ):
        made.add_column(heading, justify="right", no_wrap=True)
    shown = names or [result["arm"] for result in results]
    for name, result, step_time in zip(shown, results, step_times, strict=True):
        made.add_row(
            escape(name),
            result["status"],
            *([DASH if result["lr"] is None else f"{result['lr']:g}"] if tuned else []),
            plain(result["final_loss"], 4),
            signed(result["gap"], result["gap_interval"]),
            byte_size(result["bytes_per_step"]),
            step_time,
            DASH if result["to_target_s"] is None else f"{result['to_target_s']:.2f}",
            byte_size(result["to_target_bytes"]),
        )
    return made


def remarks(document: dict[str, Any]) -> list[str]:
    """A sentence for each arm that is not ok or has its best rate at the edge, and for an early end."""
    found = []
    for result in document["results"]:
        if result["status"] != "ok":
            found.append(f"{result['arm']}: {result['status']}; {result['detail']}.")
        if result["remark"]:
            grid = ", ".join(f"{trial['lr']:g}" for trial in result["tuning"])
            found.append(f"{result['arm']}: {result['remark']} ({result['lr']:g} of {grid}).")
    if document["ended"] == "budget":
        found.append(_budget_remark(document))
    elif document["ended"] == "interrupted":
        found.append("Interrupted: the table shows what was measured until then.")
    return found


def _budget_remark(document: dict[str, Any]) -> str:
    results, ended = document["results"], f"The time budget of {document['settings']['budget_s']:g} s ended"
    if any(result["tuning"] for result in results) and not any(result["runs"] for result in results):
        return (
            f"{ended} the tuning of learning rates, so no seed was trained; "
            "set a larger --budget, or fewer rates."
        )
    return f"{ended} the run; --budget sets it."


def _title(document: dict[str, Any]) -> str:
    settings, link = document["settings"], document["link"]
    seeds = settings["seeds"]
    where = f"an emulated link of {link['name']}" if link["rate_bits"] else "an unshaped link"
    return (
        f"{settings['task']}: {settings['ranks']} ranks, {settings['steps']} steps, "
        f"{seeds} seed{'s' if seeds > 1 else ''}, over {where}"
    )
