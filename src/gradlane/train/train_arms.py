"""``gradlane train``: runs a plan seed by seed, and returns one JSON document."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..bench.arms import DDP
from ..bench.hosts import Hosts, hosts_for
from ..bench.record import FORMAT, command_line, provenance
from .loss_figures import default_target, final_step, result
from .seed_run import FAILED, SeedRun
from .seed_training import ArmProgress, SeedTraining
from .tasks import TASKS, Task
from .train_plan import TrainPlan

Runs = dict[str, list[SeedRun]]


def train_arms(
    plan: TrainPlan,
    on_progress: Callable[[ArmProgress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train all arms; the document of the run. It is partial after Ctrl-C or at the end of the time budget.

    ``on_progress`` is called for every arm after every step, ``on_note`` if a link cannot be emulated here.
    """
    torch.set_num_threads(1)  # before any fork: a pool of OpenMP threads does not survive one
    until = time.monotonic() + plan.budget
    task = TASKS[plan.task](plan.layer_width)
    runs: Runs = {arm: [] for arm in plan.all_arms}
    ended = "complete"
    with hosts_for(plan.ranks, plan.link) as hosts:
        if hosts.note:
            on_note(hosts.note)
        try:
            for seed in range(plan.seeds):
                if time.monotonic() >= until or not _train_seed(
                    plan, task, seed, runs, hosts, on_progress, until
                ):
                    ended = "budget"
                    break
        except KeyboardInterrupt:
            ended = "interrupted"
    return _document(plan, task, runs, hosts, ended, command or command_line())


def _train_seed(
    plan: TrainPlan,
    task: Task,
    seed: int,
    runs: Runs,
    hosts: Hosts,
    on_progress: Callable[[ArmProgress], None],
    until: float,
) -> bool:
    current: dict[str, SeedRun] = {}
    for arm, earlier in runs.items():
        if not any(run.status in FAILED for run in earlier):  # it would fail again
            current[arm] = SeedRun(seed)
            earlier.append(current[arm])
    if not current:
        return True
    return SeedTraining(plan, task, seed, current, hosts.prepare, on_progress).train(until)


def _document(
    plan: TrainPlan, task: Task, runs: Runs, hosts: Hosts, ended: str, command: Sequence[str]
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
        "made": provenance(command),
        "settings": settings,
        "ended": ended,
        "link": {
            "name": hosts.name,
            "rate_bits": hosts.link.rate_bits,
            "emulated": hosts.emulated,
            "note": hosts.note,
        },
        "unit": task.unit,
        "target": target,
        "results": [result(arm, runs, plan.seeds, final, target) for arm in runs],
    }
