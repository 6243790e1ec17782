"""``gradlane bench``: compares arms on each link, and returns one record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ..core.events import wire_bytes
from ..errors import InvalidValue
from .arm_processes import ArmProcesses
from .arms import COMPUTE, DDP, described
from .bench_plan import BenchPlan
from .bench_rank import BenchRank, local_steps_of
from .hosts import Hosts, hosts_for
from .link import Link
from .record import FORMAT, command_line, provenance
from .rounds import Rounds
from .step_figures import Step, compared, figures_of
from .workload import Workload, workload

COPIES = 4  # of the parameters that a rank holds: weights, gradients, buckets, state of the strategy


@dataclass(frozen=True)
class StepProgress:
    """The step that is about to run."""

    number: int  # among all steps of the plan
    link: str
    ranks: int
    arm: str
    step: int  # below 0: warm-up


OnProgress = Callable[[StepProgress], None]


def bench_arms(plan: BenchPlan, on_progress: OnProgress = lambda progress: None) -> dict[str, Any]:
    """Run the plan; its record. After Ctrl-C, or at the end of the time budget, the record is partial."""
    torch.set_num_threads(1)  # as in the ranks; and a pool of threads would not survive the fork
    work = workload(plan.model)
    _check_memory(plan, work)
    settings = [(link, ranks) for link in plan.links for ranks in plan.ranks]
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    ended = "complete"
    for number, (link, ranks) in enumerate(settings):
        setting = _Setting(plan, work, link, ranks, number, on_progress)
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
            "budget_s": plan.budget_s,
        },
        "ended": ended,
        "results": results,
    }


class _Setting:
    """All arms on one link with one number of ranks."""

    def __init__(
        self, plan: BenchPlan, work: Workload, link: Link, ranks: int, number: int, on_progress: OnProgress
    ) -> None:
        self._plan = plan
        self._work = work
        self._ranks = ranks
        self._hosts = Hosts(link, False, "")
        self._step_number = number * plan.total_steps // plan.settings
        self._on_progress = on_progress
        self._rounds: Rounds | None = None
        self._periods = [
            1 if (local := local_steps_of(arm)) is None else local.every for arm in plan.all_arms
        ]
        self._steps: dict[str, list[Step]] = {arm: [] for arm in plan.all_arms}

    def run(self, until: float) -> bool:
        """False if the time ended before all steps were done."""
        plan = self._plan
        with hosts_for(self._ranks, self._hosts.link) as self._hosts:
            self._rounds = Rounds(plan.all_arms, self._start)
            with self._rounds as rounds:
                for number in range(plan.warmup + plan.steps):
                    if time.monotonic() > until:
                        return False
                    step = number - plan.warmup
                    rounds.run(
                        number,
                        timeout=self._round_timeout,
                        on_start=lambda arm, step=step: self._report(arm, step),  # type: ignore[misc]
                        on_sample=lambda arm, sample, step=step: self._keep(arm, sample, step),  # type: ignore[misc]
                    )
        return True

    def rows(self, ended: str) -> list[dict[str, Any]]:
        """An entry of the record for each arm."""
        plan, failed = self._plan, self._rounds.failed if self._rounds else {}
        link = self._hosts.link
        rows = {arm: figures_of(steps, self._hosts.emulated) for arm, steps in self._steps.items()}
        entries = []
        for arm, row in rows.items():
            if arm in failed:
                status, detail = failed[arm].status, str(failed[arm])
            elif row["steps"] == plan.steps:
                status, detail = "ok", ""
            else:
                status = "partial" if row["steps"] else "not run"
                why = "the time budget ended" if ended == "budget" else "it was interrupted"
                detail = f"{row['steps']} of {plan.steps} steps: {why}"
            about = {
                "link": self._hosts.name,
                "rate_bits": link.rate_bits,
                "emulated": self._hosts.emulated,
                "note": self._hosts.note,
                "ranks": self._ranks,
                "arm": arm,
                "strategy": described(arm),
                "status": status,
                "detail": detail,
            }
            entries.append({**about, **compared(row, link, rows[DDP], rows[COMPUTE])})
        return entries

    def _start(self, arm: str) -> ArmProcesses:
        plan, hosts = self._plan, self._hosts
        return ArmProcesses(
            BenchRank, self._ranks, arm, self._work, plan.bucket_mb, hosts.emulated,
            prepare=hosts.prepare, timeout=self._round_timeout,
        )  # fmt: skip

    def _report(self, arm: str, step: int) -> None:
        self._on_progress(StepProgress(self._step_number, self._hosts.name, self._ranks, arm, step))
        self._step_number += 1

    def _keep(self, arm: str, samples: Step, step: int) -> None:
        if step >= 0:
            self._steps[arm].append(samples)

    @property
    def _round_timeout(self) -> float:
        period = max(self._periods)
        if self._plan.timeout_s is not None:
            return self._plan.timeout_s * period
        dense = wire_bytes("all_reduce", self._work.gradient_bytes, self._ranks)
        return period * (60.0 + 10 * self._hosts.link.seconds(dense))


def _check_memory(plan: BenchPlan, work: Workload) -> None:
    """Refuse a plan that needs more than the free memory: all arms run at the same time."""
    free = psutil.virtual_memory().available
    arms, ranks = len(plan.all_arms), max(plan.ranks)
    needed = arms * ranks * (COPIES * work.gradient_bytes + 100e6)
    if needed > free:
        raise InvalidValue(
            f"{arms} arms of {ranks} ranks with {work.parameters:,} parameters need about "
            f"{needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free; use fewer arms or ranks, "
            "or a smaller model"
        )
