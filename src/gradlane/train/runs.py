"""What one arm did with one seed: its evaluations, and what it had spent by then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bench.crew import ArmFailed
from .worker import Trained

FAILED = ("crashed", "hung")


@dataclass
class Run:
    """``status`` is "partial" until the last step is evaluated. A loss that is no number is None."""

    seed: int
    status: str = "partial"
    detail: str = ""
    steps: list[int] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0  # by rank 0, up to now

    def trained(self, step: int, samples: Sequence[Trained]) -> None:
        """Step ``step``, counted from 0, on all ranks."""
        last, first = max(sample.end for sample in samples), min(sample.start for sample in samples)
        self.step_seconds.append(last - first)
        self.sent_bytes = samples[0].sent_bytes
        if not all(math.isfinite(sample.loss) for sample in samples):
            self._diverged(f"the training loss is no finite number in step {step}")

    def evaluated(self, step: int, loss: float) -> None:
        """After ``step`` steps."""
        self.steps.append(step)
        self.loss.append(loss if math.isfinite(loss) else None)
        self.bytes.append(self.sent_bytes)
        self.seconds.append(sum(self.step_seconds))
        if not math.isfinite(loss):
            self._diverged(f"the held-out loss is no finite number after {step} steps")

    def complete(self) -> None:
        if self.status == "partial":
            self.status = "ok"

    def failed(self, failure: ArmFailed) -> None:
        self.status, self.detail = failure.status, str(failure)

    def at(self, step: int) -> float | None:
        """The loss of the evaluation after ``step`` steps, which must be there."""
        return self.loss[self.steps.index(step)]

    def as_json(self) -> dict[str, Any]:
        kept = ("seed", "status", "detail", "steps", "loss", "bytes", "seconds")
        return {name: getattr(self, name) for name in kept}

    def _diverged(self, detail: str) -> None:
        if self.status == "partial":  # the first time is the one to tell
            self.status, self.detail = "diverged", detail
