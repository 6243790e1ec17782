"""A whole plan, seed by seed; what comes out is a JSON document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..bench.arms import DDP
from ..bench.place import Place, place
from ..bench.record import FORMAT, command_line, made
from .figures import default_target, final_step, result
from .plan import Plan
from .runs import FAILED, Run
from .seed import SeedTrial, Standing
from .tasks import TASKS, Task

Runs = dict[str, list[Run]]


def run_trial(
    plan: Plan,
    on_standing: Callable[[Standing], None] = lambda standing: None,
    on_note: Callable[[str], None] = lambda note: None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train until all is done, the budget is spent, or Ctrl-C; the document of what there is by then.

    ``on_standing`` hears of every arm after every step, ``on_note`` why a link cannot be emulated here.
    """
    torch.set_num_threads(1)  # before any fork: a pool of OpenMP threads does not survive one
    until = time.monotonic() + plan.budget
    task = TASKS[plan.task](plan.layer_width)
    runs: Runs = {arm: [] for arm in plan.all_arms}
    ended = "complete"
    with place(plan.ranks, plan.link) as where:
        if where.note:
            on_note(where.note)
        try:
            for seed in range(plan.seeds):
                if time.monotonic() >= until or not _train_seed(
                    plan, task, seed, runs, where, on_standing, until
                ):
                    ended = "budget"
                    break
        except KeyboardInterrupt:
            ended = "interrupted"
    return _document(plan, task, runs, where, ended, command or command_line())


def _train_seed(
    plan: Plan,
    task: Task,
    seed: int,
    runs: Runs,
    where: Place,
    on_standing: Callable[[Standing], None],
    until: float,
) -> bool:
    current: dict[str, Run] = {}
    for arm, earlier in runs.items():
        if not any(run.status in FAILED for run in earlier):  # it would fail again, perhaps by hanging
            current[arm] = Run(seed)
            earlier.append(current[arm])
    if not current:
        return True
    return SeedTrial(plan, task, seed, current, where.prepare, on_standing).train(until)


def _document(
    plan: Plan, task: Task, runs: Runs, where: Place, ended: str, command: Sequence[str]
) -> dict[str, Any]:
    final, target = final_step(runs), plan.target
    if target is None and final is not None:
        target = default_target(runs[DDP], final)
    settings = {
        "task": task.name,
        "parameters": sum(p.numel() for p in task.model().parameters()),
        "ranks": plan.ranks,
        "steps": plan.steps,
        "seeds": plan.seeds,
        "batch": plan.batch_size,
        "width": plan.layer_width,
        "optimizer": plan.optimizer,
        "lr": plan.rate,
        "every": plan.interval,
        "link": plan.link.name,
        "budget_s": plan.budget,
    }
    return {
        "kind": "train",
        "format": FORMAT,
        "made": made(command),
        "settings": settings,
        "ended": ended,
        "link": {
            "name": where.name,
            "rate_bits": where.link.rate_bits,
            "emulated": where.emulated,
            "note": where.note,
        },
        "unit": task.unit,
        "target": target,
        "results": [result(arm, runs, plan.seeds, final, target) for arm in runs],
    }
