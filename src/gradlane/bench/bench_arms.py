"""``gradlane bench``: compares arms on each link, and returns one record."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch

from ..errors import InvalidValue
from .arms import is_hsdp
from .bench_plan import BenchPlan
from .bench_setting import BenchSetting, OnProgress
from .hsdp import load_fsdp
from .record import FORMAT, command_line, provenance
from .workload import Workload, workload

COPIES = 4  # of the parameters that a rank holds: weights, gradients, buckets, state of the strategy


def bench_arms(plan: BenchPlan, on_progress: OnProgress = lambda progress: None) -> dict[str, Any]:
    """Run the plan; its record. After Ctrl-C, or at the end of the time budget, the record is partial."""
    torch.set_num_threads(1)  # as in the ranks; and a pool of threads would not survive the fork
    work = workload(plan.model)
    _check_memory(plan, work)
    if any(map(is_hsdp, plan.arms)):
        load_fsdp()
    settings = [(link, ranks) for link in plan.links for ranks in plan.worlds]
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    ended = "complete"
    for number, (link, ranks) in enumerate(settings):
        setting = BenchSetting(plan, work, link, ranks, number, on_progress)
        if ended != "interrupted":
            try:
                until = started + plan.budget_s * (number + 1) / len(settings)
                if not setting.run(until):
                    ended = "budget"
            except KeyboardInterrupt:
                ended = "interrupted"
        results += setting.rows(ended)
    return {
        "kind": "bench",
        "format": FORMAT,
        "made": provenance(command_line()),
        "settings": {
            "model": plan.model,
            "parameters": work.parameters,
            "bucket_mb": plan.bucket_mb,
            "steps": plan.steps,
            "warmup": plan.warmup,
            "in_a_row": plan.in_a_row,
            "budget_s": plan.budget_s,
        },
        "ended": ended,
        "results": results,
    }


def _check_memory(plan: BenchPlan, work: Workload) -> None:
    """Refuse a plan that needs more than the free memory: all arms run at the same time."""
    free = psutil.virtual_memory().available
    arms, ranks = len(plan.all_arms), max(plan.worlds)
    needed = arms * ranks * (COPIES * work.gradient_bytes + 100e6)
    if needed > free:
        raise InvalidValue(
            f"{arms} arms of {ranks} ranks with {work.parameters:,} parameters need about "
            f"{needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free; use fewer arms or ranks, "
            "or a smaller model"
        )
