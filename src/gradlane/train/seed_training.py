"""All arms with one seed: the same weights, the same data, one step each per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..bench.arm_processes import ArmProcesses
from ..bench.rounds import Rounds
from ..core.events import wire_bytes
from .seed_run import SeedRun
from .tasks import Task
from .train_plan import TrainPlan
from .train_rank import Evaluate, Train, TrainRank

TIMEOUT = 60.0  # seconds for a step, besides the time on the link
DENSE_STEPS = 10  # times the link's time for a dense gradient are added to the timeout


@dataclass(frozen=True)
class ArmProgress:
    """An arm in a seed: its steps until now, its last held-out loss, and its status."""

    arm: str
    seed: int
    rate: float
    step: int
    loss: float | None
    status: str


@dataclass
class SeedTraining:
    """Fills ``runs``, one for each arm at its rate. ``prepare`` moves a rank to its emulated host."""

    plan: TrainPlan
    task: Task
    seed: int
    runs: Mapping[str, SeedRun]
    prepare: Callable[[int], None] | None
    on_progress: Callable[[ArmProgress], None]

    def train(self, until: float) -> bool:
        """False if the time ``until`` came before the last step."""
        model = self.task.start(self.seed)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        on_link = self.plan.link.seconds(wire_bytes("all_reduce", size, self.plan.ranks))
        self._step_timeout = TIMEOUT + DENSE_STEPS * on_link

        def start(arm: str) -> ArmProcesses:
            parts = (arm, self.task, model, self.plan, self.seed, self.runs[arm].rate)
            return ArmProcesses(TrainRank, self.plan.ranks, *parts, prepare=self.prepare)

        with Rounds(tuple(self.runs), start) as rounds:
            self._rounds = rounds
            return self._steps(until)

    def _steps(self, until: float) -> bool:
        self._evaluate(0)
        for step in range(self.plan.steps):
            if time.monotonic() >= until:
                if step % self.plan.interval:
                    self._evaluate(step)  # or the steps since the last one would not show
                return False
            self._round(step, Train(step), lambda run, samples, step=step: run.add_step(step, samples))
            if not self._rounds.running:
                break
            self._report(step + 1)
            if (step + 1) % self.plan.interval == 0 or step + 1 == self.plan.steps:
                self._evaluate(step + 1)
        for arm in self._rounds.running:
            self.runs[arm].mark_complete()
        self._report(self.plan.steps)
        return True

    def _evaluate(self, step: int) -> None:
        self._round(step, Evaluate(), lambda run, samples: run.add_evaluation(step, samples[0]))
        self._report(step)

    def _round(self, number: int, order: object, record: Callable[..., None]) -> None:
        def on_sample(arm: str, samples: list[Any]) -> None:
            record(self.runs[arm], samples)

        self._rounds.run(number, order, timeout=self._step_timeout, on_sample=on_sample)
        for arm, failure in self._rounds.failed.items():
            self.runs[arm].mark_failed(failure)

    def _report(self, step: int) -> None:
        for arm, run in self.runs.items():
            self.on_progress(
                ArmProgress(arm, self.seed, run.rate, step, run.loss[-1] if run.loss else None, run.status)
            )
