"""All arms with one seed: the same weights, the same data, a step of each in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..bench.crew import Crew
from ..bench.turns import Turns
from ..core.events import wire_bytes
from .plan import Plan
from .runs import Run
from .tasks import Task
from .worker import Evaluate, Train, Worker

PATIENCE = 60.0  # seconds for a step before it counts as hung, beside what the link needs
DENSE_STEPS = 10  # of dense, on the link, are waited for on top


@dataclass(frozen=True)
class Standing:
    """Where an arm is: in which seed, after how many steps, its last held-out loss, and how it fares."""

    arm: str
    seed: int
    step: int
    loss: float | None
    status: str


@dataclass
class SeedTrial:
    """Fills ``runs``, one of each arm. ``prepare`` moves a rank to its host, where there are any."""

    plan: Plan
    task: Task
    seed: int
    runs: Mapping[str, Run]
    prepare: Callable[[int], None] | None
    on_standing: Callable[[Standing], None]

    def train(self, until: float) -> bool:
        """False if ``time.monotonic()`` passed ``until`` before the last step."""
        model = self.task.start(self.seed)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        on_link = self.plan.link.seconds(wire_bytes("all_reduce", size, self.plan.ranks))
        self._patience = PATIENCE + DENSE_STEPS * on_link

        def start(arm: str) -> Crew:
            parts = (arm, self.task, model, self.plan, self.seed)
            return Crew(Worker, self.plan.ranks, *parts, prepare=self.prepare)

        with Turns(tuple(self.runs), start) as turns:
            self._turns = turns
            return self._steps(until)

    def _steps(self, until: float) -> bool:
        self._evaluate(0)
        for step in range(self.plan.steps):
            if time.monotonic() >= until:
                if step % self.plan.interval:
                    self._evaluate(step)  # so that the time since the last one was not for nothing
                return False
            self._round(step, Train(step), lambda run, samples, step=step: run.trained(step, samples))
            if not self._turns.running:
                break
            self._tell(step + 1)
            if (step + 1) % self.plan.interval == 0 or step + 1 == self.plan.steps:
                self._evaluate(step + 1)
        for arm in self._turns.running:
            self.runs[arm].complete()
        self._tell(self.plan.steps)
        return True

    def _evaluate(self, step: int) -> None:
        self._round(step, Evaluate(), lambda run, samples: run.evaluated(step, samples[0]))
        self._tell(step)

    def _round(self, number: int, order: object, record: Callable[..., None]) -> None:
        def heard(arm: str, samples: list[Any]) -> None:
            record(self.runs[arm], samples)

        self._turns.round(number, order, patience=self._patience, on_sample=heard)
        for arm, failure in self._turns.failed.items():
            self.runs[arm].failed(failure)

    def _tell(self, step: int) -> None:
        for arm, run in self.runs.items():
            self.on_standing(Standing(arm, self.seed, step, run.loss[-1] if run.loss else None, run.status))
