"""A rank of an arm in ``gradlane train``: one training step or one evaluation at each order."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..bench.arms import Arm
from ..bench.step_timeline import phase_seconds
from .tasks import Task
from .train_plan import TrainPlan

WARM_UP = 0.05  # of the steps
MOMENTUM = 0.9


@dataclass(frozen=True)
class Train:
    """Order: train step ``step``, counted from 0."""

    step: int


@dataclass(frozen=True)
class Evaluate:
    """Order: compute the held-out loss, on rank 0."""


@dataclass(frozen=True)
class Trained:
    """One step of one rank. Times are ``time.perf_counter``, which all processes of a machine share."""

    start: float
    end: float
    loss: float
    sent_bytes: int  # by this rank, from its first step on
    phases: dict[str, float] | None = None  # seconds of a strategy's requests in this step


class TrainRank:
    """All ranks are forked with the same model. Their data differ, but are the same for every arm."""

    def __init__(
        self, rank: int, arm: str, task: Task, model: nn.Module, plan: TrainPlan, seed: int, rate: float
    ) -> None:
        self._rank, self._task, self._plan, self._seed, self._rate = rank, task, plan, seed, rate
        # All ranks have the same weights already; sending them over a slow link takes seconds.
        self._ddp = DistributedDataParallel(model, init_sync=False)
        self._optimizer = _optimizer(plan.optimizer, rate, self._ddp)
        self._arm = Arm(self._ddp, arm, self._optimizer)

    def __call__(self, order: object) -> Trained | float | None:
        if isinstance(order, Train):
            return self._train(order.step)
        if self._rank != 0:
            return None
        with self._arm.agreed():
            return self._task.held_out_loss(self._ddp.module)

    def _train(self, step: int) -> Trained:
        batch = self._task.batch(self._plan.batch_size, self._seed, self._rank, step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * share_of_rate(step, self._plan.steps)
        self._arm.step_begins()
        start = time.perf_counter()
        loss = self._ddp(*batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        if step == self._plan.steps - 1:
            self._arm.finish()
        end = time.perf_counter()
        self._arm.step_done()
        phases = phase_seconds(self._arm.take_events()) if self._arm.has_strategy else None
        return Trained(start, end, loss.item() / self._task.nats, self._arm.sent_bytes, phases)


def share_of_rate(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def _optimizer(name: str, rate: float, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
