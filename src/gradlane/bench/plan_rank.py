"""A rank that measures what a plan needs: the link, compute alone, and the work of each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from .._version import __version__
from ..agree.limits import Limit
from ..core.scopes import scopes_of
from ..errors import InvalidValue
from ..lane.open import Opened, open_lane
from ..plan.echo import work_of
from ..plan.forecast import is_off
from ..plan.measure_curves import measure_curves
from ..plan.scale import at_rate
from ..plan.works import slowest_works, works_as_dict, works_from
from ..simulate.buckets import nodes_of
from ..strategies.auto.ladder import ladder
from ..telemetry.ledger import Ledger
from .plan_figures import PlanFigures
from .plan_steps import measure_steps
from .workload import Workload

TIMEOUT = 60.0
TOGETHER = "start all ranks at the same time, on idle machines"


@dataclass(frozen=True)
class Task:
    """What to measure; the same on all ranks."""

    workload: Workload
    strategies: Sequence[str] | None = None
    """None: the ladder, with that across nodes where nodes have several ranks."""
    bucket_mb: float | None = None
    per_node: int | None = None
    """Ranks that share the link of a node; None: those with one host name."""
    bytes_per_s: float | None = None
    """Plan for a link of this rate, in place of the measured one."""
    always: bool = False
    """Time the strategies even if DDP is nearly as fast as compute alone, so that nothing can pay."""


def measure_plan(group: Any, task: Task) -> PlanFigures:
    """Call it on all ranks of the group; all ranks get the same figures."""
    device = next(task.workload.model.parameters()).device
    against = None
    if device.type != "cpu":
        against = InvalidValue(
            f"the model is on {device}, and steps are measured on the CPU only; plan from figures: "
            "--compute 180ms --link 10gbit"
        )
    agreed = {"strategies": task.strategies and list(task.strategies)}
    with _lane(group, agreed, task.per_node, against) as opened:
        return _measured(group, opened, task)


@contextmanager
def _lane(
    group: Any,
    must_agree: dict[str, Any],
    per_node: int | None = None,
    against: InvalidValue | None = None,
) -> Iterator[Opened]:
    opened = open_lane(
        group, torch.device("cpu"), Ledger(), {"version": __version__, **must_agree}, parameters=[],
        limit=Limit(TIMEOUT, TOGETHER), ranks_per_node=per_node, against=against, doing="plan",
    )  # fmt: skip
    try:
        yield opened
    finally:
        opened.lane.close()


def _measured(group: Any, opened: Opened, task: Task) -> PlanFigures:
    curves = measure_curves(opened, torch.device("cpu"), nodes=True, ddp_group=group)
    figures = measure_steps(opened, task.workload, task.bucket_mb, curves)
    if task.bytes_per_s is not None:
        figures = replace(figures, curves=at_rate(figures.curves, task.bytes_per_s))
    curves = figures.curves
    if not task.always and is_off(figures.dense):
        return figures
    strategies = task.strategies or ladder(curves.per_node)
    scopes = scopes_of(0, nodes_of(curves.world, curves.per_node))
    own = {text: work_of(text, figures.layouts, scopes, figures.dtype) for text in strategies}
    _, notes = opened.board.agree("work", {"works": works_as_dict(own)}, doing="plan")
    return replace(figures, works=slowest_works([works_from(other["works"]) for other in notes]))


def plan_rank(rank: int, task: Task) -> Any:
    """For ``ArmProcesses``: a step of this rank is one measurement."""
    return lambda order: measure_plan(dist.group.WORLD, task).as_dict()


def curves_rank(rank: int) -> Any:
    """The same for the link alone."""

    def measure(order: object) -> dict[str, Any]:
        world = dist.group.WORLD
        with _lane(world, {}) as opened:
            return measure_curves(opened, torch.device("cpu"), ddp_group=world).as_dict()

    return measure
