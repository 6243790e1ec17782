"""The figures of a plan, measured between processes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import InvalidValue
from ..plan.curves import Curves
from .arm_processes import ArmProcesses
from .hosts import Hosts, hosts_for
from .link import Link
from .plan_figures import PlanFigures
from .plan_rank import Task, curves_rank, plan_rank

TIMEOUT = 300.0
MOST = 64  # ranks


def measure_locally(task: Task, ranks: int, link: Link) -> tuple[PlanFigures, str]:
    """Also a note, if the link could not be emulated: then it is planned for, from what loopback does."""
    per_node = 1 if task.per_node is None else task.per_node
    if not 2 <= ranks <= MOST:
        raise InvalidValue(
            f"ranks={ranks} cannot be measured here; use 2 to {MOST}, or plan from figures: --compute 180ms"
        )
    if per_node < 1 or ranks % per_node or ranks == per_node:
        raise InvalidValue(
            f"{ranks} ranks are not several nodes of {per_node}; use 1 or more a node, and a multiple of it"
        )
    torch.set_num_threads(1)  # as in the ranks; and a pool of threads would not survive the fork
    with hosts_for(ranks, link, per_node) as hosts:
        note = hosts.note
        task = replace(task, per_node=per_node)
        if not hosts.emulated and link.rate_bits is not None:
            task = replace(task, bytes_per_s=link.payload_bytes_per_s)
            note += f"; what loopback does is moved to {link.name}"
        return PlanFigures.from_dict(_of_rank_0(plan_rank, ranks, hosts, task)), note


def curves_locally(ranks: int, link: Link) -> Curves:
    torch.set_num_threads(1)
    with hosts_for(ranks, link) as hosts:
        return Curves.from_dict(_of_rank_0(curves_rank, ranks, hosts))


def _of_rank_0(build: Callable[..., Any], ranks: int, hosts: Hosts, *args: object) -> Any:
    """All ranks have the same."""
    processes = ArmProcesses(build, ranks, *args, prepare=hosts.prepare, timeout=TIMEOUT)
    try:
        return processes.step(None, TIMEOUT, "while it measured")[0]
    finally:
        processes.close()
