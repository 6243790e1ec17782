"""The figures from which a plan is made: measured on all ranks, the same on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..core.bucket import Layout, Slot
from ..plan.beat import Beat, beat_from
from ..plan.curves import Curves
from ..plan.forecast import ERROR, ddp_forecast
from ..plan.pipeline import Forecast
from ..plan.works import Works, works_as_dict, works_from


@dataclass(frozen=True)
class PlanFigures:
    curves: Curves
    beat: Beat
    layouts: tuple[Layout, ...]
    itemsize: int
    """Bytes of one element of the gradient."""
    cores: float
    """Of one rank."""
    works: Works = field(default_factory=dict)
    """By strategy; none where nothing can pay."""
    spread: float = 0.0
    """Standard deviation of the logarithm of compute, over ranks and steps."""
    ddp_s: float | None = None
    """Of a step of DDP as it was measured, where it was."""
    error: float = ERROR
    """Of a forecast: how far that of DDP was off, and 5 % at least."""

    @property
    def dtype(self) -> torch.dtype:
        """Of a gradient with elements of this size: what a strategy sends depends on nothing else."""
        return {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[self.itemsize]

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """Of the gradient, bucket by bucket."""
        return tuple(sum(slot.numel for slot in layout) * self.itemsize for layout in self.layouts)

    @property
    def dense(self) -> Forecast:
        """Of DDP without a hook."""
        return ddp_forecast(self.beat, self.bucket_bytes, self.curves, self.cores)

    def as_dict(self) -> dict[str, Any]:
        return {
            "curves": self.curves.as_dict(),
            "beat": asdict(self.beat),
            "layouts": [[[name, list(shape)] for name, shape in layout] for layout in self.layouts],
            "itemsize": self.itemsize,
            "cores": self.cores,
            "works": works_as_dict(self.works),
            "spread": self.spread,
            "ddp_s": self.ddp_s,
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> PlanFigures:
        return cls(
            Curves.from_dict(found["curves"]),
            beat_from(found["beat"]),
            tuple(
                Layout(Slot(name, torch.Size(shape)) for name, shape in layout) for layout in found["layouts"]
            ),
            found["itemsize"],
            found["cores"],
            works_from(found["works"]),
            found["spread"],
            found["ddp_s"],
            found["error"],
        )
