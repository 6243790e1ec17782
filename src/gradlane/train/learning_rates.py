"""Learning rates: how ``--lr`` is read, and which rate of a grid is best for an arm.

Each arm is trained with each rate, on a seed that is not reported. So all arms are tuned with the same
effort, and no rate is picked on the losses that are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InvalidValue
from .seed_run import FAILED, SeedRun

SHAPE = "write numbers above 0 with commas between, as 0.05,0.1,0.2"


def parse_rates(text: str) -> tuple[float, ...]:
    """The numbers in a text such as ``0.05,0.1``; ``TrainPlan`` checks that they can train."""
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise InvalidValue(f"lr={text!r} has an empty place; {SHAPE}")
    try:
        return tuple(float(part) for part in parts)
    except ValueError:
        raise InvalidValue(f"lr={text!r} is not a number; {SHAPE}") from None


def best_run(tried: Sequence[SeedRun]) -> SeedRun | None:
    """The run with the lowest final loss, of equal ones the lowest rate. None if no run counts.

    A run that diverged, crashed or ended early does not count. An arm that hung has no best run at all.
    """
    if any(run.status == "hung" for run in tried):
        return None
    losses = [(run.final_loss, run.rate, run) for run in tried if run.final_loss is not None]
    return min(losses, key=lambda entry: entry[:2])[2] if losses else None


def tuning_figures(tried: Sequence[SeedRun], runs: Sequence[SeedRun]) -> dict[str, Any]:
    """The rate of an arm's reported runs, the grid that it comes from, and a remark if it is at the edge."""
    grid = [
        {"lr": run.rate, "loss": run.final_loss, "status": run.status, "detail": run.detail} for run in tried
    ]
    rate = runs[0].rate if runs else None
    return {"lr": rate, "tuning": grid, "remark": _at_edge(rate, [run.rate for run in tried])}


def why_untuned(tried: Sequence[SeedRun]) -> tuple[str, str]:
    """The status of an arm that has no reported run, and its detail: the worst that happened to it."""
    if best_run(tried) or any(run.status == "partial" for run in tried):
        return "not run", "the run ended while learning rates were tuned"
    for status in (*FAILED, "diverged"):
        for run in tried:
            if run.status == status:
                return status, f"learning rate {run.rate:g}, {run.detail}"
    raise AssertionError("a run is ok, partial, diverged, crashed or hung")


def _at_edge(rate: float | None, grid: Sequence[float]) -> str:
    if rate is None or min(grid, default=rate) < rate < max(grid, default=rate) or not grid:
        return ""
    return f"best rate is the {'highest' if rate == max(grid) else 'lowest'} tried: widen the grid"
