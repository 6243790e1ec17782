"""``gradlane bench``: arms against each other, link by link, as one record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ..core.events import wire_bytes
from ..errors import InvalidValue
from .arms import COMPUTE, DDP, check_arm, whole_text
from .crew import Crew
from .figures import Step, compared, figures_of
from .link import Link
from .place import Place, place
from .record import FORMAT, command_line, made
from .sample import Worker
from .turns import Turns
from .workload import Workload, workload

MOST_RANKS = 64
COPIES = 4  # of the parameters that a rank holds: weights, gradients, buckets, what a strategy keeps


@dataclass(frozen=True)
class Plan:
    """What to measure; refuses what cannot be before anything starts."""

    arms: Sequence[str]
    links: Sequence[Link]
    ranks: Sequence[int] = (2,)
    model: str = "mlp9m"
    bucket_mb: float | None = None
    steps: int = 20
    warmup: int = 4  # DDP rebuilds its buckets after the first; torch's PowerSGD starts in the third
    budget_s: float = 900.0
    patience_s: float | None = None

    def __post_init__(self) -> None:
        for arm in self.arms:
            check_arm(arm)
        for ranks in self.ranks:
            if not 2 <= ranks <= MOST_RANKS:
                raise InvalidValue(f"ranks={ranks} cannot be compared; use 2 to {MOST_RANKS}")
        if self.steps < 1:
            raise InvalidValue(f"steps={self.steps} measures nothing; use 1 or more")
        if self.warmup < 1:
            raise InvalidValue(
                f"warmup={self.warmup}: the first step of DDP is unlike the others; use 1 or more"
            )
        for name in ("budget_s", "bucket_mb", "patience_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"{name}={value:g} is not above 0")

    @property
    def all_arms(self) -> tuple[str, ...]:
        """DDP, which all are compared with, and compute alone, which none can beat, are always there."""
        return tuple(dict.fromkeys((DDP, COMPUTE, *self.arms)))

    @property
    def turns(self) -> int:
        """How many steps there will be in all."""
        return len(self.links) * len(self.ranks) * len(self.all_arms) * (self.warmup + self.steps)


@dataclass(frozen=True)
class Progress:
    """Where a bench is."""

    turn: int
    link: str
    ranks: int
    arm: str
    step: int  # below 0: warm-up


def compare(plan: Plan, on_progress: Callable[[Progress], None] = lambda progress: None) -> dict[str, Any]:
    """Run it all; the record, whole or partial. Ctrl-C and the time budget end it early, not badly."""
    torch.set_num_threads(1)  # as in the ranks; and a pool of threads would not survive the fork
    work = workload(plan.model)
    _check_memory(plan, work)
    sections = [(link, ranks) for link in plan.links for ranks in plan.ranks]
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    ended = "complete"
    for number, (link, ranks) in enumerate(sections):
        section = _Section(plan, work, link, ranks, number, on_progress)
        if ended != "interrupted":
            try:
                until = started + plan.budget_s * (number + 1) / len(sections)
                if not section.run(until):
                    ended = "budget"
            except KeyboardInterrupt:
                ended = "interrupted"
        results += section.rows(ended)
    return {
        "kind": "bench",
        "format": FORMAT,
        "made": made(command_line()),
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


class _Section:
    """All arms on one link with one number of ranks."""

    def __init__(
        self,
        plan: Plan,
        work: Workload,
        link: Link,
        ranks: int,
        number: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._plan = plan
        self._work = work
        self._ranks = ranks
        self._place = Place(link, False, "")
        self._turn = number * plan.turns // (len(plan.links) * len(plan.ranks))
        self._on_progress = on_progress
        self._turns: Turns | None = None
        self._steps: dict[str, list[Step]] = {arm: [] for arm in plan.all_arms}

    def run(self, until: float) -> bool:
        """False if the time was up before all steps were taken."""
        plan = self._plan
        with place(self._ranks, self._place.link) as self._place:
            self._turns = Turns(plan.all_arms, self._crew)
            with self._turns as turns:
                for number in range(plan.warmup + plan.steps):
                    if time.monotonic() > until:
                        return False
                    step = number - plan.warmup
                    turns.round(
                        number,
                        patience=self._patience,
                        on_turn=lambda arm, step=step: self._tell(arm, step),  # type: ignore[misc]
                        on_sample=lambda arm, sample, step=step: self._keep(arm, sample, step),  # type: ignore[misc]
                    )
        return True

    def rows(self, ended: str) -> list[dict[str, Any]]:
        plan, failed = self._plan, self._turns.failed if self._turns else {}
        link = self._place.link
        rows = {arm: figures_of(steps, self._place.emulated) for arm, steps in self._steps.items()}
        told = []
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
                "link": self._place.name,
                "rate_bits": link.rate_bits,
                "emulated": self._place.emulated,
                "note": self._place.note,
                "ranks": self._ranks,
                "arm": arm,
                "strategy": whole_text(arm),
                "status": status,
                "detail": detail,
            }
            told.append({**about, **compared(row, link, rows[DDP], rows[COMPUTE])})
        return told

    def _crew(self, arm: str) -> Crew:
        plan, where = self._plan, self._place
        return Crew(
            Worker, self._ranks, arm, self._work, plan.bucket_mb, where.emulated,
            prepare=where.prepare, patience=self._patience,
        )  # fmt: skip

    def _tell(self, arm: str, step: int) -> None:
        self._on_progress(Progress(self._turn, self._place.name, self._ranks, arm, step))
        self._turn += 1

    def _keep(self, arm: str, samples: Step, step: int) -> None:
        if step >= 0:
            self._steps[arm].append(samples)

    @property
    def _patience(self) -> float:
        if self._plan.patience_s is not None:
            return self._plan.patience_s
        dense = wire_bytes("all_reduce", self._work.gradient_bytes, self._ranks)
        return 60.0 + 10 * self._place.link.seconds(dense)


def _check_memory(plan: Plan, work: Workload) -> None:
    """All arms are there at the same time; better refuse than be ended by the kernel."""
    free = psutil.virtual_memory().available
    arms, ranks = len(plan.all_arms), max(plan.ranks)
    needed = arms * ranks * (COPIES * work.gradient_bytes + 100e6)
    if needed > free:
        raise InvalidValue(
            f"{arms} arms of {ranks} ranks with {work.parameters:,} parameters need about "
            f"{needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free; use fewer arms or ranks, "
            "or a smaller model"
        )
