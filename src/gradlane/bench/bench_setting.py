"""All arms of a comparison on one link with one number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.events import wire_bytes
from .arm_processes import ArmProcesses
from .arms import COMPUTE, DDP, HSDP, described, is_hsdp
from .bench_plan import BenchPlan
from .bench_rank import BenchRank, local_steps_of
from .hosts import Hosts, hosts_for
from .link import Link
from .rounds import Rounds
from .sample import Step
from .step_figures import compared, figures_of
from .workload import Workload


@dataclass(frozen=True)
class StepProgress:
    """The step that is about to run."""

    number: int  # among all steps of the plan
    link: str
    ranks: int
    arm: str
    step: int  # below 0: warm-up


OnProgress = Callable[[StepProgress], None]


class BenchSetting:
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
        per_host = 1 if plan.nodes is None else plan.nodes.per_node
        with hosts_for(self._ranks, self._hosts.link, per_host) as self._hosts:
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
        link, nodes, hosts = self._hosts.link, plan.nodes, self._hosts
        rows = {arm: figures_of(steps, hosts, nodes) for arm, steps in self._steps.items()}
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
                "link": hosts.name,
                "rate_bits": link.rate_bits,
                "emulated": hosts.emulated,
                "note": hosts.note,
                "ranks": self._ranks,
                "nodes": None if nodes is None else nodes.count,
                "per_node": None if nodes is None else nodes.per_node,
                "interface_of": "node" if nodes is not None and hosts.emulated else "rank",
                "arm": arm,
                "strategy": described(arm),
                "status": status,
                "detail": detail,
            }
            if is_hsdp(arm):
                row["exposed_s"] = None  # FSDP's collectives are inside of forward and backward
            hsdp = rows.get(HSDP) if is_hsdp(arm) else None
            entries.append({**about, **compared(row, link, rows[DDP], rows[COMPUTE], hsdp)})
        return entries

    def _start(self, arm: str) -> ArmProcesses:
        plan, hosts = self._plan, self._hosts
        return ArmProcesses(
            BenchRank, self._ranks, arm, self._work, plan.bucket_mb, hosts.emulated, plan.nodes,
            plan.in_a_row, prepare=hosts.prepare, timeout=self._round_timeout,
        )  # fmt: skip

    def _report(self, arm: str, step: int) -> None:
        self._on_progress(StepProgress(self._step_number, self._hosts.name, self._ranks, arm, step))
        self._step_number += 1

    def _keep(self, arm: str, samples: Step, step: int) -> None:
        if step >= 0:
            self._steps[arm].append(samples)

    @property
    def _round_timeout(self) -> float:
        period = max(self._plan.in_a_row, *self._periods)
        if self._plan.timeout_s is not None:
            return self._plan.timeout_s * period
        dense = wire_bytes("all_reduce", self._work.gradient_bytes, self._ranks)
        sharing = 1 if self._plan.nodes is None else self._plan.nodes.per_node
        return period * (60.0 + 10 * self._hosts.link.seconds(sharing * dense))
