"""``gradlane doctor``: all checks, on this machine or in this job."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..local import RankFailed, run_ranks
from .environment import check_environment
from .estimates import STRATEGIES, Estimate, estimates
from .finding import Finding
from .job import MEET, Examined, cannot_connect, check_job, in_a_job
from .machine import check_machine
from .measure_link import MeasuredLink, measure
from .reachability import check_reachability

DEFAULT_PARAMETERS = 9_400_000
LOCAL_RANKS = 2


@dataclass(frozen=True)
class Report:
    """The result of ``examine``. All ranks of a job have the same, except for ``rank``."""

    where: str
    rank: int
    findings: tuple[Finding, ...]
    parameters: int
    link: MeasuredLink | None
    """None if it could not be measured."""
    estimates: tuple[Estimate, ...]

    @property
    def broken(self) -> bool:
        return any(finding.level == "broken" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "rank": self.rank,
            "findings": [asdict(finding) for finding in self.findings],
            "parameters": self.parameters,
            "link": self.link.as_dict() if self.link else None,
            "estimates": [{**asdict(row), "seconds": row.seconds} for row in self.estimates],
            "broken": self.broken,
        }


def examine(parameters: int = DEFAULT_PARAMETERS, *, rate_bits: float | None = None) -> Report:
    """Check this machine, and measure the link between two local ranks.

    Under ``torchrun``, or with a process group: check the job, and measure between its ranks. All ranks must
    call it. ``rate_bits``: estimate for a link of that rate in place of the measured one.
    """
    examined = check_job(_check_here, STRATEGIES) if in_a_job() else _check_locally()
    estimated: list[Estimate] = []
    if (link := examined.link) is not None:
        estimated = estimates(parameters, link if rate_bits is None else link.at_rate(rate_bits / 8))
    return Report(examined.where, examined.rank, tuple(examined.findings), parameters, link, tuple(estimated))


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
