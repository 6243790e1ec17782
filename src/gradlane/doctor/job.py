"""Checks of the job in which this process is a rank."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..agree.board import Board
from ..agree.limits import Limit
from ..errors import GradlaneError
from ..lane.open import store_of
from ..teardown import shutdown
from .finding import Finding
from .measure_link import TIMEOUT, TOGETHER, MeasuredLink, measure
from .shared_link import check_shared_link, ranks_per_host

MEET = 60.0  # seconds for all ranks of a job to arrive

CheckHere = Callable[[int, int], list[Finding]]
"""The findings of one rank, given the number of ranks on its host and the number of hosts."""


class Examined(NamedTuple):
    where: str
    rank: int
    findings: list[Finding]
    link: MeasuredLink | None


def in_a_job() -> bool:
    """Whether torchrun or a similar launcher started this process, or it has a process group."""
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
    return launched or (dist.is_available() and dist.is_initialized())


def check_job(check_here: CheckHere, strategies: Sequence[str]) -> Examined:
    """The ranks exchange their findings through the store, before they connect to each other."""
    store, rank, world = _rendezvous()
    board = Board(store, "gradlane/doctor", rank, world, Limit(MEET, TOGETHER))
    host = socket.gethostname()
    token, notes = board.agree("hosts", {"host": host}, doing="doctor")
    hosts = [note["host"] for note in notes]
    count = len(set(hosts))
    board = board.corner(token)
    own = [dataclasses.asdict(finding) for finding in check_here(hosts.count(host), count)]
    _, notes = board.agree("findings", {"findings": own}, doing="doctor")
    findings = merged([[Finding(**each) for each in note["findings"]] for note in notes], hosts)
    findings += check_shared_link(hosts)
    where = f"{world} rank{'s' if world > 1 else ''} on {count} host{'s' if count > 1 else ''}"
    unreachable = any(finding.level == "broken" and finding.topic == "interface" for finding in findings)
    if world == 1 or unreachable:  # there is no link, or they would only wait for each other
        return Examined(where, rank, findings, None)
    try:
        link = _measured(board.store("group"), rank, world, strategies)
        return Examined(where, rank, findings, link.shared_by(ranks_per_host(hosts)))
    except (RuntimeError, GradlaneError) as error:
        return Examined(where, rank, [*findings, cannot_connect(error)], None)


def _rendezvous() -> tuple[dist.Store, int, int]:
    if dist.is_initialized():
        group = dist.group.WORLD
        return store_of(group), dist.get_rank(), dist.get_world_size()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=MEET)))  # type: ignore[no-any-return]


def _measured(store: dist.Store, rank: int, world: int, strategies: Sequence[str]) -> MeasuredLink:
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if dist.is_initialized():
        on_device = nccl and "nccl" in str(dist.get_backend_config())
        return measure(dist.group.WORLD, _device(on_device), strategies)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "nccl" if nccl else "gloo", store=store, rank=rank, world_size=world, timeout=limit
    )
    try:
        return measure(dist.group.WORLD, _device(nccl), strategies)
    finally:
        shutdown()


def _device(cuda: bool) -> torch.device:
    if not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    torch.cuda.set_device(device)
    return device


def cannot_connect(error: BaseException) -> Finding:
    reason = str(error).strip().splitlines()[-1][:300]
    advice = (
        "check that the ranks reach each other: interface, firewall, and the same gradlane on all of them"
    )
    return Finding("link", "broken", f"could not be measured: {reason}", advice)


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """The findings of all ranks, each once, with the ranks that have it if not all do."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    found = []
    for finding, who in ranks.items():
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in who))
        some = f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} ({where})"
        found.append(finding if len(who) == len(by_rank) else replace(finding, who=some))
    topics = list(dict.fromkeys(finding.topic for finding in found))
    return sorted(found, key=lambda finding: topics.index(finding.topic))
