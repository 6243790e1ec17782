"""``gradlane doctor``: all of it, on this machine or in this job."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..local import RankFailed, run_ranks
from .environment import check_environment
from .finding import Finding
from .job import MEET, Examined, cannot_connect, check_job, in_a_job
from .machine import check_machine
from .measure_link import MeasuredLink, measure
from .price import STRATEGIES, Estimate, estimates
from .reachability import check_reachability

DEFAULT_PARAMETERS = 9_400_000
LOCAL_RANKS = 2


@dataclass(frozen=True)
class Report:
    """What ``examine`` found; on a job's ranks the same but for ``rank``."""

    where: str
    rank: int
    findings: tuple[Finding, ...]
    parameters: int
    link: MeasuredLink | None
    """None where it could not be measured."""
    estimates: tuple[Estimate, ...]

    @property
    def broken(self) -> bool:
        return any(finding.level == "broken" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        priced = [{**dataclasses.asdict(row), "seconds": row.seconds} for row in self.estimates]
        return {**dataclasses.asdict(self), "estimates": priced, "broken": self.broken}


def examine(parameters: int = DEFAULT_PARAMETERS, *, rate_bits: float | None = None) -> Report:
    """Look at this machine, and measure between two local ranks; under ``torchrun``, or with a process group,
    at the job, and between its own ranks, all of which must call it.

    ``rate_bits``: price the gradients on a link of that rate, not on the one that was measured.
    """
    seen = check_job(_check_here, STRATEGIES) if in_a_job() else _check_locally()
    priced: list[Estimate] = []
    if (link := seen.link) is not None:
        priced = estimates(
            parameters, link if rate_bits is None else replace(link, bytes_per_s=rate_bits / 8)
        )
    return Report(seen.where, seen.rank, tuple(seen.findings), parameters, link, tuple(priced))


def _check_here(ranks_here: int | None, hosts: int) -> list[Finding]:
    return [
        *check_machine(ranks_here, os.environ),
        *check_environment(os.environ),
        *check_reachability(os.environ, hosts),
    ]


def _check_locally() -> Examined:
    findings = _check_here(None, 1)
    where = f"this machine, with {LOCAL_RANKS} local ranks"
    if any(finding.level == "broken" and finding.topic == "interface" for finding in findings):
        return Examined(where, 0, findings, None)
    try:
        return Examined(where, 0, findings, run_ranks(_local_rank, LOCAL_RANKS, deadline=MEET)[0])
    except RankFailed as error:
        return Examined(where, 0, [*findings, cannot_connect(error)], None)


def _local_rank(rank: int) -> MeasuredLink:
    return measure(dist.group.WORLD, torch.device("cpu"), STRATEGIES)
