"""The beat of steps that were watched while DDP communicated: when each gradient was ready, and the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..core.bucket import Layout
from .beat import Beat


class Watched(NamedTuple):
    """One step, as a rank saw it."""

    ready: dict[str, float]
    """When the gradient of each parameter was ready."""
    ended: float
    """When backward ended, with all that DDP waited for."""
    cpu: float
    """CPU seconds of the process so far."""


def beats_of(steps: Sequence[Watched], layouts: Sequence[Layout]) -> list[Beat]:
    """From the second step on. A bucket is ready with its last gradient; what DDP waits for after the last
    bucket is no compute."""
    return [_beat(before, step, layouts) for before, step in pairwise(steps)]


def _beat(before: Watched, step: Watched, layouts: Sequence[Layout]) -> Beat:
    full: list[float] = []
    for layout in layouts:
        latest = max((step.ready[slot.name] for slot in layout if slot.name in step.ready), default=0.0)
        full.append(max([latest, *full[-1:]]))  # DDP sends its buckets in order
    gaps = tuple(after - first for first, after in pairwise(full))
    cores = (step.cpu - before.cpu) / (step.ended - before.ended)
    return Beat(max(full[0] - before.ended, 0.0), gaps, 0.0, min(max(cores, 0.0), 1.0))


def periods_of(steps: Sequence[Watched]) -> list[float]:
    """Seconds of each step, from the second one on."""
    return [step.ended - before.ended for before, step in pairwise(steps)]
