"""Steps of compute alone, and of DDP, as the ranks of a plan measure them."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import TypeVar

import torch

from ..lane.gloo_scheduling import scheduled_as_usual
from ..lane.open import Opened
from ..plan.beat import beat_from, typical_beat
from ..plan.curves import Curves
from ..plan.forecast import ERROR
from ..plan.pipeline import step_seconds
from ..plan.prober import Prober
from .compute_alone import ComputeAlone, works_of_passes
from .plan_figures import PlanFigures
from .workload import Workload

STEPS, WARMUP = 15, 3  # DDP rebuilds its buckets after its first step
MIN_STEPS, SECONDS = 2, 3.0  # of each kind, and the time for them
Found = TypeVar("Found")
NORMAL = 1.4826  # standard deviations of a normal number in its median distance to the mean


def measure_steps(opened: Opened, workload: Workload, bucket_mb: float | None, curves: Curves) -> PlanFigures:
    """Steps of compute alone: those of the slowest rank, and how much ranks and steps differ. And of DDP: how
    well this link and this machine can be predicted."""
    watched, prober = ComputeAlone(opened, workload, bucket_mb), Prober(opened, torch.device("cpu"))
    for _ in range(WARMUP):
        watched.step()
    beats = _repeated(prober, watched.step, lambda beat: beat.compute)
    passes = _repeated(prober, watched.step_with_passes, float)
    with scheduled_as_usual():
        whole = _repeated(prober, watched.whole_step, float)
    note = {
        "host": socket.gethostname(), "beat": asdict(typical_beat(beats)), "step": median(passes),
        "passes": watched.passes.seconds, "compute": [beat.compute for beat in beats], "ddp": median(whole),
    }  # fmt: skip
    _, notes = opened.board.agree("beat", note, doing="plan")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = sum(other["host"] == note["host"] for other in notes)
    beat = max((beat_from(other["beat"]) for other in notes), key=lambda beat: beat.compute)
    by_step = zip(*(other["compute"] for other in notes), strict=True)
    beat = beat.lasting(median(map(max, by_step)))  # a step waits for its slowest rank, now one, now another
    works = works_of_passes(map(max, zip(*(other["passes"] for other in notes), strict=True)))
    forecast = step_seconds(beat, works, curves, cores=cores / shared, commit=True).seconds
    beat = replace(beat, beside=max(max(other["step"] for other in notes) - forecast, 0.0))
    spread = _spread([other["compute"] for other in notes])
    layouts, itemsize = tuple(watched.layouts), watched.dtype.itemsize
    ddp_s = max(other["ddp"] for other in notes)
    figures = PlanFigures(curves, beat, layouts, itemsize, cores / shared, {}, spread, ddp_s)
    return replace(figures, error=max(ERROR, abs(figures.dense.seconds / ddp_s - 1)))


def _repeated(prober: Prober, step: Callable[[], Found], seconds: Callable[[Found], float]) -> list[Found]:
    """Several steps; few where they are slow. The first one, which may form connections, does not count."""
    steps: list[Found] = []
    most = 1 + STEPS
    while len(steps) < most:
        prober.together()  # as in training: ranks of one machine share its cores
        steps.append(step())
        most = min(most, prober.at_most(1 + max(MIN_STEPS, int(SECONDS / seconds(steps[-1])))))
    return steps[1:]


def _spread(compute: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the logarithm of one rank's compute around its step's; a few odd steps aside."""
    logs = [[math.log(seconds) for seconds in rank] for rank in compute]
    steps = [fmean(step) for step in zip(*logs, strict=True)]
    apart = [abs(value - mean) for rank in logs for value, mean in zip(rank, steps, strict=True)]
    return NORMAL * median(apart) * math.sqrt(len(logs) / (len(logs) - 1))
