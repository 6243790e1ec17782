"""``gradlane train``: tunes the rates if there are several, trains all seeds, returns one JSON document."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..bench.arms import DDP
from ..bench.hosts import Hosts, hosts_for
from ..bench.record import FORMAT, command_line, provenance
from .learning_rates import best_run
from .loss_figures import default_target, final_step, result
from .seed_run import FAILED, SeedRun
from .seed_training import ArmProgress, SeedTraining
from .tasks import TASKS, Task
from .train_plan import TUNING_SEED, TrainPlan

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
    with hosts_for(plan.ranks, plan.link) as hosts:
        if hosts.note:
            on_note(hosts.note)
        training = _Training(plan, task, hosts, on_progress, until)
        try:
            ended = "complete" if training.train() else "budget"
        except KeyboardInterrupt:
            ended = "interrupted"
    return _document(training, ended, command or command_line())


@dataclass
class _Training:
    """The runs of each arm: ``tried`` holds one per rate, on the tuning seed, and ``runs`` one per seed."""

    plan: TrainPlan
    task: Task
    hosts: Hosts
    on_progress: Callable[[ArmProgress], None]
    until: float
    tried: Runs = field(init=False)
    runs: Runs = field(init=False)

    def __post_init__(self) -> None:
        self.tried = {arm: [] for arm in self.plan.all_arms}
        self.runs = {arm: [] for arm in self.plan.all_arms}

    def train(self) -> bool:
        """False if the time ``until`` came before the last step."""
        tuned = all(self._try_rate(rate) for rate in self.plan.tuned_rates)
        return tuned and all(self._train_seed(seed) for seed in range(self.plan.seeds))

    def _try_rate(self, rate: float) -> bool:
        current: dict[str, SeedRun] = {}
        for arm, earlier in self.tried.items():
            # A crash can come from a rate that is too high. Another hang would only take time.
            if not any(run.status == "hung" for run in earlier):
                current[arm] = SeedRun(TUNING_SEED, rate)
        return self._train(current, self.tried)

    def _train_seed(self, seed: int) -> bool:
        current: dict[str, SeedRun] = {}
        for arm, earlier in self.runs.items():
            rate = self._rate(arm)
            if rate is not None and not any(run.status in FAILED for run in earlier):  # it would fail again
                current[arm] = SeedRun(seed, rate)
        return self._train(current, self.runs)

    def _rate(self, arm: str) -> float | None:
        """None if the arm has no finite loss at any rate."""
        if not self.plan.tuned_rates:
            return self.plan.rates[0]
        best = best_run(self.tried[arm])
        return None if best is None else best.rate

    def _train(self, current: Mapping[str, SeedRun], runs: Runs) -> bool:
        if time.monotonic() >= self.until:
            return False
        for arm, run in current.items():
            runs[arm].append(run)
        if not current:
            return True
        seed = next(iter(current.values())).seed
        training = SeedTraining(self.plan, self.task, seed, current, self.hosts.prepare, self.on_progress)
        return training.train(self.until)


def _document(training: _Training, ended: str, command: Sequence[str]) -> dict[str, Any]:
    plan, task, hosts, runs = training.plan, training.task, training.hosts, training.runs
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
        "lr": list(plan.tuned_rates) or plan.rates[0],
        "every": plan.interval,
        "link": plan.link.name,
        "budget_s": plan.budget,
    }
    if plan.tuned_rates:
        settings["tuning_seed"] = TUNING_SEED
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
        "results": [result(arm, runs, plan.seeds, final, target, training.tried[arm]) for arm in runs],
    }
