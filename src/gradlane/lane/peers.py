"""This rank's connections to the others: groups of the lane's own, formed and given up together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from ..agree.board import Board, Document
from ..agree.deadline import NoAnswer, within
from ..agree.limits import Limit
from ..core.collectives import Scope
from ..core.numbers import is_whole
from ..errors import InvalidValue, PeerFailed, PeerLost, RanksDisagree
from .gloo_workers import wait_for_idle_workers
from .perform import is_closed, sever

Turn = Literal["first", "later"]
TURNS: tuple[Turn, ...] = ("first", "later")
GRACE = 1.4  # seconds to wait for the others' reports once a connection broke: they report before they close
SOON = 0.4  # seconds a store may take to take a note
ALIVE = 1.0  # seconds after which a store that does not answer is taken for lost


class Peers:
    """The ranks of one DDP model as its lane sees them.

    The lane has groups of its own, so that its collectives never meet DDP's in one queue, and so that
    a rank which fails can let go of them: its peers notice at once, all report through the store, and
    the next step forms new ones.
    """

    def __init__(self, board: Board, hosts: list[str], *, ranks_per_node: int | None = None) -> None:
        self.board = board
        self.rank = board.rank
        self.world = board.world
        self.timeout = board.timeout
        self._nodes = _nodes(hosts, ranks_per_node)
        self._groups: dict[tuple[Scope, Turn], Any] = {}
        self._dropped = False
        self._life = 0  # how often the groups were given up
        self._token = "first"  # where this life's groups find their addresses

    def sizes(self) -> dict[str, int]:
        """Ranks in each scope this rank is in; "cross" only where all nodes are equally large."""
        mine = next(node for node in self._nodes if self.rank in node)
        sizes = {"world": self.world, "node": len(mine)}
        if len({len(node) for node in self._nodes}) == 1:
            sizes["cross"] = len(self._nodes)
        return sizes

    def group(self, over: Scope, turn: Turn, step: int) -> Any:
        """The group of a scope; formed when it is first asked for, at the same request on all ranks.

        First requests of a bucket and later ones have a group each: the first are issued by the hook,
        in DDP's order, the later ones by the lane's thread, in the same order. So the order within
        each group is fixed, and bucket 1 may start while bucket 0 is in its second phase.
        """
        if not self._groups:
            self._meet(step)
        if (over, turn) not in self._groups:
            self._groups[over, turn] = self._formed(over, turn)
        return self._groups[over, turn]

    def _meet(self, step: int) -> None:
        """After a failure: be sure that all ranks come from the same step, then form new groups."""
        if self._life:
            topic = f"life{self._life}"
            self._token, told = self.board.agree(
                topic, {"step": step}, doing="after a failure, forming new connections"
            )
            steps = {rank: note["step"] for rank, note in enumerate(told)}
            if len(set(steps.values())) > 1:
                raise RanksDisagree(
                    f"the ranks failed in different steps ({steps}), so their weights differ; "
                    "restart from a checkpoint"
                )
        for turn in TURNS:
            self._groups["world", turn] = self._formed("world", turn)

    def _formed(self, over: Scope, turn: Turn) -> Any:
        members = self._members(over)
        store = self.board.store(f"{self._token}/{over}/{turn}/{members[0]}")
        try:
            return _connected(store, members.index(self.rank), len(members), self.timeout)
        except (RuntimeError, NoAnswer) as error:
            where = f"connecting ranks {members}"
            self.report(where, error, raised=False)
            raise self.diagnose(where, error) from error

    def _members(self, over: Scope) -> list[int]:
        if over == "world":
            return list(range(self.world))
        mine = next(node for node in self._nodes if self.rank in node)
        if over == "node":
            return mine
        if len({len(node) for node in self._nodes}) > 1:
            counts = [len(node) for node in self._nodes]
            raise InvalidValue(
                f"over='cross' needs nodes of equal size, these have {counts} ranks; use over='world'"
            )
        return [node[mine.index(self.rank)] for node in self._nodes]

    def report(self, where: str, error: BaseException, *, raised: bool) -> None:
        """Tell the others why this rank gives up; they look there when their connection breaks."""
        told = {"where": where, "raised": raised, "type": type(error).__name__, "message": str(error)[:2000]}
        with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
            within(SOON, lambda: self.board.pin(f"life{self._life}/failed", told), "the store")

    def diagnose(self, where: str, error: BaseException, limit: Limit | None = None) -> PeerFailed:
        """Why a connection broke: a peer that raised, a peer that is silent, or just the network. It was
        waited for until the ``limit``, if that is not the lane's own."""
        limit = limit or self.board.limit
        told: dict[int, Document] = {}
        try:
            within(ALIVE, lambda: self.board.read("alive", self.rank), "the store")
            within(2 * GRACE + ALIVE, lambda: self._hear(told), "the store")
        except Exception as lost:  # noqa: BLE001  any error of any store means the same here
            host = self.board.host
            if host.rank not in told:  # else it has lost the same rank as this one, and ended meanwhile
                return PeerLost(
                    f"{where}: lost contact ({_brief(error)}), and the store too ({_brief(lost)}); "
                    f"{host.who} is gone or did not answer within {limit.seconds:g} s",
                    host.rank,
                )
        self._let_all_hear(told)
        for rank, report in told.items():
            if report["raised"]:
                return PeerFailed(
                    f"{where}: rank {rank} raised {report['type']}: {report['message']} "
                    f"[in {report['where']}]",
                    rank,
                )
        silent = [rank for rank in range(self.world) if rank != self.rank and rank not in told]
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

    def _hear(self, told: dict[int, Document]) -> None:
        """The others' reports, until all have reported, one of them an error, or none came for a while; twice
        as long while several are silent, of which more are likely slow than lost."""
        news = time.monotonic()
        while (silent := self.world - 1 - len(told)) and time.monotonic() < news + GRACE * min(silent, 2):
            for rank in range(self.world):
                if rank == self.rank or rank in told:
                    continue
                if (report := self.board.read(f"life{self._life}/failed", rank)) is not None:
                    told[rank], news = report, time.monotonic()
            if any(report["raised"] for report in told.values()):
                return
            time.sleep(0.02)

    def _let_all_hear(self, told: dict[int, Document]) -> None:
        """A rank that ends takes the store with it, if it holds it: so it stays for those who still read."""
        topic = f"life{self._life}/heard"

        def until_all_have() -> None:
            deadline = time.monotonic() + ALIVE
            while time.monotonic() < deadline and not all(self.board.read(topic, rank) for rank in told):
                time.sleep(0.02)

        with contextlib.suppress(Exception):  # the store is gone
            within(SOON, lambda: self.board.pin(topic, {"heard": True}), "the store")
            if self.board.host.rank == self.rank:
                within(ALIVE + SOON, until_all_have, "the store")

    def sever(self, turn: Turn) -> None:
        """End what is under way on the connections of a turn, to be dropped when it has."""
        for (_, whose), group in self._groups.items():
            if whose == turn:
                sever(group)

    def gone(self, ranks: list[int]) -> list[int]:
        """Those of them whose connections to this rank are closed, where there are any. Ask while nothing is
        under way."""
        group = self._groups.get(("world", "later"))
        return [] if group is None else [rank for rank in ranks if is_closed(group, rank)]

    def abandon(self, until_ended: Callable[[], None]) -> None:
        """End what another thread has under way. That drops the groups, and these here are the last to go."""
        groups = list(self._groups.values())
        for group in groups:
            sever(group)
        until_ended()
        wait_for_idle_workers()

    def drop(self, turn: Turn) -> None:
        """Close the connections of a turn, where nothing is under way: peers that wait for this rank on
        them fail now."""
        dropped = [self._groups.pop(key) for key in list(self._groups) if key[1] == turn]
        if dropped:
            self._dropped = True
            wait_for_idle_workers()

    def next_life(self) -> None:
        """The next request forms new groups, after the ranks have met again."""
        self._life += self._dropped  # without groups all ranks will try again in the same life
        self._dropped = False

    def close(self) -> None:
        for turn in TURNS:
            self.drop(turn)


def _nodes(hosts: list[str], ranks_per_node: int | None) -> list[list[int]]:
    world = len(hosts)
    if ranks_per_node is not None:
        if not is_whole(ranks_per_node) or ranks_per_node < 1 or world % ranks_per_node:
            raise InvalidValue(
                f"ranks_per_node={ranks_per_node!r} does not divide the {world} ranks; use a number that does"
            )
        return [list(range(start, start + ranks_per_node)) for start in range(0, world, ranks_per_node)]
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())


def _connected(store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    """Its time-out does not cover a store that falls silent."""
    limit = timedelta(seconds=timeout)
    return within(
        timeout + SOON, lambda: dist.ProcessGroupGloo(store, rank, size, limit), "the store or a peer"
    )


def _brief(error: BaseException) -> str:
    text = str(error).split("] ", 1)[-1]
    return text.split(". This is", 1)[0].split("\n", 1)[0][:300] or type(error).__name__
