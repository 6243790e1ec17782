"""Ranks compare notes through the store: no collective, so a missing rank is an error, not a hang."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from hashlib import sha256
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from ..errors import PeerLost
from ..log import log
from .deadline import NoAnswer, host_of, within
from .limits import Limit, late_after

Document = dict[str, Any]
PROBE_EVERY = 1.0  # seconds between two checks of who is gone
MARGIN = 1.0  # seconds beyond the timeout, for the store's last answer


def nobody(ranks: list[int]) -> list[int]:
    """Without connections nobody is known to be gone."""
    return []


class Board:
    """A part of the job's store to which each rank of a group can pin notes, and read those of the others.

    Notes are JSON: nothing that comes from a peer is unpickled.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, world: int, limit: Limit) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self.rank = rank
        self.world = world
        self.limit = limit
        self.gone: Callable[[list[int]], list[int]] = nobody
        """Which of these ranks will never come, because their connections are closed."""
        self.host = host_of(store, world)

    @property
    def timeout(self) -> float:
        """In seconds."""
        return self.limit.seconds

    def allowing(self, limit: Limit) -> Board:
        """The same notes and ranks with another limit."""
        board = copy.copy(self)
        board.limit = limit
        return board

    def store(self, topic: str) -> dist.Store:
        """A part of the store in which the ranks of a new group find each other."""
        return dist.PrefixStore(topic, self._store)

    def corner(self, token: str) -> Board:
        """The same ranks on an empty board."""
        return Board(self.store(token), "board", self.rank, self.world, self.limit)

    def pin(self, topic: str, document: Document) -> None:
        self._store.set(f"{topic}/{self.rank}", json.dumps(document))

    def read(self, topic: str, rank: int) -> Document | None:
        """A rank's note, or None if it has written none."""
        key = f"{topic}/{rank}"
        if not self._store.check([key]):
            return None
        found: Document = json.loads(self._store.get(key))
        return found

    def agree(self, topic: str, document: Document, *, doing: str) -> tuple[str, list[Document]]:
        """The documents of all ranks, the same list on every rank, and a token that only this call has.

        A store may still have notes of an earlier run of the job (a restart, a group of the same name). So
        each document carries a random number, each rank pins the digest of all documents that it has read,
        and a rank goes on only when all digests are the same.
        """
        try:
            return within(self.timeout + MARGIN, lambda: self._agree(topic, document, doing), "the store")
        except NoAnswer as lost:
            message = f"{doing}: {lost}; {self.host.who} is stopped or out of reach"
            raise PeerLost(message, self.host.rank) from None
        except PeerLost:
            raise
        except RuntimeError as lost:  # every error of the store's client is one
            brief = str(lost).split("\n", 1)[0][:300]
            message = f"{doing}: the store failed ({brief}); {self.host.who} is gone or out of reach"
            raise PeerLost(message, self.host.rank) from lost

    def _agree(self, topic: str, document: Document, doing: str) -> tuple[str, list[Document]]:
        self.pin(topic, {**document, "nonce": token_hex(8)})
        began = time.monotonic()
        pause, logged, probed = 0.0005, False, 0.0
        while True:
            found = [self.read(topic, rank) for rank in range(self.world)]
            if None not in found:
                digest = sha256(json.dumps(found).encode()).hexdigest()
                self.pin(f"{topic}/read", {"digest": digest})
                digests = [self.read(f"{topic}/read", rank) for rank in range(self.world)]
                behind = [rank for rank, note in enumerate(digests) if note != {"digest": digest}]
                if not behind:
                    return digest[:16], [note for note in found if note is not None]
            else:
                behind = [rank for rank, note in enumerate(found) if note is None]
            waited = time.monotonic() - began
            if waited > self.timeout:
                self._give_up(doing, behind)
            if waited > probed + PROBE_EVERY:
                probed = waited
                self._raise_if_gone(doing, self.gone(behind))
            if waited > late_after(self.timeout) and not logged:
                logged = True
                log.warning("%s: %s not come (waited %.3g s)", doing, have(behind), waited)
            time.sleep(pause)
            pause = min(pause * 2, 0.05)

    def _raise_if_gone(self, doing: str, gone: list[int]) -> None:
        if gone:
            who = ", ".join(map(str, gone))
            raise PeerLost(f"{doing}: rank {who} is gone: its connections are closed", gone[0])

    def _give_up(self, doing: str, missing: list[int]) -> None:
        who = ", ".join(map(str, missing))
        raise PeerLost(
            f"{doing}: rank {who} did not take part within {self.timeout:g} s; every rank of the "
            "process group must make this call, in the same order. If it was only late (an evaluation, a "
            f"save of its own), {self.limit.way_out}",
            missing[0],
        )


def have(ranks: list[int]) -> str:
    """ "rank 1 has", or "ranks 1, 2 have"."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
