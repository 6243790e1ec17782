"""This rank's connections to its peers: the lane's own groups, formed and closed together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from ..agree.board import Board, Document
from ..agree.deadline import NoAnswer, within
from ..agree.limits import Limit
from ..core.collectives import Scope
from ..core.scopes import Members
from ..errors import InvalidValue, PeerFailed, PeerLost, RanksDisagree
from .gloo_scheduling import connected
from .gloo_workers import wait_for_idle_workers
from .perform import is_closed, sever

Queue = Literal["first", "later"]
QUEUES: tuple[Queue, ...] = ("first", "later")
GRACE = 1.4  # seconds to wait for the peers' reports once a connection broke: they report before they close
WRITE_TIMEOUT = 0.4  # seconds for the store to take a note
READ_TIMEOUT = 1.0  # seconds after which a store that does not answer counts as lost


class Peers:
    """The ranks of one DDP model as its lane sees them.

    The lane has groups of its own. So its collectives never meet DDP's in one queue, and a rank that fails
    can close them: its peers notice at once, all report through the store, and the next step forms new ones.
    """

    def __init__(self, board: Board, members: Members) -> None:
        self.board = board
        self.rank = board.rank
        self.world = board.world
        self.timeout = board.timeout
        self._scope_members = members
        self.groups: dict[tuple[Scope, Queue], Any] = {}
        """Those that are formed; ``group`` forms one."""
        self._dropped = False
        self._generation = 0  # how often the groups were closed after a failure
        self._token = "first"  # the part of the store in which the groups of this generation find their peers

    def group(self, over: Scope, queue: Queue, step: int) -> Any:
        """The group of a scope. It is formed by the first request that needs it, the same on all ranks.

        First requests of a bucket and later ones have a group each: the first are issued by the hook,
        in DDP's order, the later ones by the lane's thread, in the same order. So the order within
        each group is fixed, and bucket 1 may start while bucket 0 is in its second phase.
        """
        if not self.groups:
            self._form_world(step)
        if (over, queue) not in self.groups:
            self.groups[over, queue] = self._formed(over, queue)
        return self.groups[over, queue]

    def _form_world(self, step: int) -> None:
        """Form the groups of all ranks; after a failure, check first that all ranks are in the same step."""
        if self._generation:
            topic = f"generation{self._generation}"
            self._token, notes = self.board.agree(
                topic, {"step": step}, doing="after a failure, forming new connections"
            )
            steps = {rank: note["step"] for rank, note in enumerate(notes)}
            if len(set(steps.values())) > 1:
                raise RanksDisagree(
                    f"the ranks failed in different steps ({steps}), so their weights differ; "
                    "restart from a checkpoint"
                )
        for queue in QUEUES:
            self.groups["world", queue] = self._formed("world", queue)

    def _formed(self, over: Scope, queue: Queue) -> Any:
        members = self._members(over)
        store = self.board.store(f"{self._token}/{over}/{queue}/{members[0]}")
        try:
            return _connected(store, members.index(self.rank), len(members), self.timeout)
        except (RuntimeError, NoAnswer) as error:
            where = f"connecting ranks {members}"
            self.report(where, error, raised=False)
            raise self.diagnose(where, error) from error

    def _members(self, over: Scope) -> list[int]:
        if over not in self._scope_members:
            raise InvalidValue(
                f"over={over!r} needs nodes with equally many ranks, and these differ; use over='world'"
            )
        return list(self._scope_members[over])

    def report(self, where: str, error: BaseException, *, raised: bool) -> None:
        """Write into the store why this rank gives up; peers read it when their connection breaks."""
        report = {
            "where": where,
            "raised": raised,
            "type": type(error).__name__,
            "message": str(error)[:2000],
        }
        with contextlib.suppress(Exception):  # the store may be gone, with the rank that hosted it
            within(WRITE_TIMEOUT, lambda: self.board.pin(self._topic("failed"), report), "the store")

    def _topic(self, name: str) -> str:
        return f"generation{self._generation}/{name}"

    def diagnose(self, where: str, error: BaseException, limit: Limit | None = None) -> PeerFailed:
        """Why a connection broke: a peer raised, a peer is silent, or only the network failed. ``limit`` is
        how long this rank waited, if not as long as the lane does."""
        limit = limit or self.board.limit
        reports: dict[int, Document] = {}
        try:
            within(READ_TIMEOUT, lambda: self.board.read("alive", self.rank), "the store")
            within(2 * GRACE + READ_TIMEOUT, lambda: self._read_reports(reports), "the store")
        except Exception as lost:  # noqa: BLE001  any error of any store means the same here
            host = self.board.host
            if host.rank not in reports:  # else it has lost the same rank as this one, and ended meanwhile
                return PeerLost(
                    f"{where}: lost contact ({_brief(error)}), and the store too ({_brief(lost)}); "
                    f"{host.who} is gone or did not answer within {limit.seconds:g} s",
                    host.rank,
                )
        self._wait_for_readers(reports)
        for rank, report in reports.items():
            if report["raised"]:
                return PeerFailed(
                    f"{where}: rank {rank} raised {report['type']}: {report['message']} "
                    f"[in {report['where']}]",
                    rank,
                )
        silent = [rank for rank in range(self.world) if rank != self.rank and rank not in reports]
        if silent:
            who = ", ".join(map(str, silent))
            return PeerLost(
                f"{where}: rank {who} is gone or did not answer within {limit.seconds:g} s "
                f"({_brief(error)}); if it was only slow, {limit.way_out}",
                silent[0],
            )
        return PeerFailed(
            f"{where}: the connection broke although all ranks are alive ({_brief(error)}); check that they "
            f"reach each other (GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', 'unset')})"
        )

    def _read_reports(self, reports: dict[int, Document]) -> None:
        """Read the peers' reports until all have reported, one reports an error, or none came for a while.

        That while is twice as long if several peers are silent: then they are more likely slow than lost.
        """
        last = time.monotonic()
        while (silent := self.world - 1 - len(reports)) and time.monotonic() < last + GRACE * min(silent, 2):
            for rank in range(self.world):
                if rank == self.rank or rank in reports:
                    continue
                if (report := self.board.read(self._topic("failed"), rank)) is not None:
                    reports[rank], last = report, time.monotonic()
            if any(report["raised"] for report in reports.values()):
                return
            time.sleep(0.02)

    def _wait_for_readers(self, ranks: Iterable[int]) -> None:
        """The rank that hosts the store ends the store when it ends: so it waits until these ranks have read
        the reports."""
        topic = self._topic("read")

        def until_all_have() -> None:
            deadline = time.monotonic() + READ_TIMEOUT
            while time.monotonic() < deadline and not all(self.board.read(topic, rank) for rank in ranks):
                time.sleep(0.02)

        with contextlib.suppress(Exception):  # the store is gone
            within(WRITE_TIMEOUT, lambda: self.board.pin(topic, {"read": True}), "the store")
            if self.board.host.rank == self.rank:
                within(READ_TIMEOUT + WRITE_TIMEOUT, until_all_have, "the store")

    def sever(self, queue: Queue) -> None:
        """End what is under way on the connections of a queue; ``drop`` them when it has ended."""
        for (_, whose), group in self.groups.items():
            if whose == queue:
                sever(group)

    def gone(self, ranks: list[int]) -> list[int]:
        """Those of the ranks whose connection to this rank is closed. Call it while nothing is under way."""
        group = self.groups.get(("world", "later"))
        return [] if group is None else [rank for rank in ranks if is_closed(group, rank)]

    def abandon(self, until_ended: Callable[[], None]) -> None:
        """End what another thread has under way. That thread drops its groups; the references here are the
        last ones."""
        groups = list(self.groups.values())
        for group in groups:
            sever(group)
        until_ended()
        wait_for_idle_workers()

    def drop(self, queue: Queue) -> None:
        """Close the connections of a queue, on which nothing is under way: peers that wait there for this
        rank fail now."""
        dropped = [self.groups.pop(key) for key in list(self.groups) if key[1] == queue]
        if dropped:
            self._dropped = True
            wait_for_idle_workers()

    def start_over(self) -> None:
        """The next request forms new groups, after the ranks have agreed on their step."""
        self._generation += self._dropped  # without groups all ranks try again in the same generation
        self._dropped = False

    def close(self) -> None:
        for queue in QUEUES:
            self.drop(queue)


def _connected(store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    """A new Gloo group. Its own timeout does not cover a store that stops answering."""
    limit = timedelta(seconds=timeout)

    return connected(
        lambda: within(
            timeout + WRITE_TIMEOUT,
            lambda: dist.ProcessGroupGloo(store, rank, size, limit),
            "the store or a peer",
        )
    )


def _brief(error: BaseException) -> str:
    text = str(error).split("] ", 1)[-1]
    return text.split(". This is", 1)[0].split("\n", 1)[0][:300] or type(error).__name__
