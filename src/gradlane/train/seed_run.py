"""The record of one arm with one seed and rate: its evaluations, and bytes and seconds until each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bench.arm_processes import ArmFailed
from .train_rank import Trained

FAILED = ("crashed", "hung")


@dataclass
class SeedRun:
    """``status`` is "partial" until the last step is evaluated. A loss that is not finite is None."""

    seed: int
    rate: float
    status: str = "partial"
    detail: str = ""
    steps: list[int] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0  # by rank 0, up to now
    phases: list[dict[str, float]] = field(default_factory=list)  # of each rank in each step, if recorded

    def add_step(self, step: int, samples: Sequence[Trained]) -> None:
        """Record step ``step``, counted from 0, with the samples of all ranks."""
        last, first = max(sample.end for sample in samples), min(sample.start for sample in samples)
        self.step_seconds.append(last - first)
        self.sent_bytes = samples[0].sent_bytes
        self.phases += [sample.phases for sample in samples if sample.phases is not None]
        if not all(math.isfinite(sample.loss) for sample in samples):
            self._mark_diverged(f"the training loss is not finite in step {step}")

    def add_evaluation(self, step: int, loss: float) -> None:
        """Record an evaluation after ``step`` steps."""
        self.steps.append(step)
        self.loss.append(loss if math.isfinite(loss) else None)
        self.bytes.append(self.sent_bytes)
        self.seconds.append(sum(self.step_seconds))
        if not math.isfinite(loss):
            self._mark_diverged(f"the held-out loss is not finite after {step} steps")

    def mark_complete(self) -> None:
        if self.status == "partial":
            self.status = "ok"

    def mark_failed(self, failure: ArmFailed) -> None:
        self.status, self.detail = failure.status, str(failure)

    def loss_at(self, step: int) -> float | None:
        """The loss after ``step`` steps, at which there must be an evaluation."""
        return self.loss[self.steps.index(step)]

    @property
    def final_loss(self) -> float | None:
        """The loss after the last step; None unless all steps were trained with finite losses."""
        return self.loss[-1] if self.status == "ok" else None

    def as_json(self) -> dict[str, Any]:
        names = ("seed", "status", "detail", "steps", "loss", "bytes", "seconds")
        return {name: getattr(self, name) for name in names}

    def _mark_diverged(self, detail: str) -> None:
        if self.status == "partial":  # keep the first
            self.status, self.detail = "diverged", detail
