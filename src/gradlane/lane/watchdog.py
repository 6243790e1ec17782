"""Who is late: a rank that waits says where, looks where the others are, and logs it once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..agree.board import Board, have
from ..agree.limits import patience
from ..core.running import Running
from ..log import log

ROLL_CALL, FORWARD = -1, -2
"""In place of a bucket: what a loop without DDP begins with, and DDP."""
PULSE = 1.0  # seconds between two signs of life, at most


class Place(NamedTuple):
    """Where a lane is. All lanes go through the same places, so ``(step, turn)`` can be compared."""

    step: int
    turn: int
    """How far it is in the step."""
    bucket: int
    doing: str

    def __str__(self) -> str:
        others = {ROLL_CALL: "the roll call", FORWARD: "the forward"}
        return f"{others.get(self.bucket, f'bucket {self.bucket}')} of step {self.step}"


Where = Callable[[], Place | None]


def place_of(serving: Running | None, turn: int) -> Place | None:
    """``turn`` counts the waits of this step that began and those that ended: it is odd during one."""
    if serving is None:
        return None
    doing = serving.doing() if serving.reduced is None else "at the end of the step"
    if serving.reduced is None and turn % 2 == 0:
        doing = f"at work after {doing}" if turn else "at work"
    return Place(serving.bucket.step, turn, serving.bucket.index, doing)


class Seen(NamedTuple):
    """A rank's last note: its place, and how many notes it has written."""

    place: Place
    beat: int


def pulse(timeout: float) -> float:
    return min(PULSE, patience(timeout) / 8)


@contextlib.contextmanager
def watched(board: Board, where: Where) -> Iterator[None]:
    """Say what is late for as long as this lasts.

    Enter it only when a wait is longer than a pulse. The store is asked on a thread of its own, which lives
    as long as the wait: a store may not answer, and the waiting thread has signals to serve.
    """
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(board, where, over), name="gradlane-late", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()


def watch(board: Board, where: Where, over: threading.Event) -> None:
    """Say what is late until it is ``over``."""
    _Watch(board, where, over).run()


class _Watch:
    def __init__(self, board: Board, where: Where, over: threading.Event) -> None:
        self._board = board
        self._where = where
        self._over = over
        self._pulse = pulse(board.timeout)
        self._patience = patience(board.timeout)

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store may have gone; the lane will say so
            self._watch()

    def _watch(self) -> None:
        here = self._where()
        since, beat = time.monotonic() - self._pulse, 0
        before: dict[int, Seen] | None = None
        told = False
        while True:
            place = self._where()
            if place != here:  # it moves: not stuck, only slow
                here, since, before, told = place, time.monotonic(), None, False
            if here is not None:
                beat += 1
                self._board.pin("late", {"place": list(here), "beat": beat})
                waited = time.monotonic() - since
                if before is None and waited > self._patience - 4 * self._pulse:
                    before = self._seen()
                elif before is not None and not told and waited > self._patience:
                    told = True
                    _say(here, before, self._seen(), self._board, waited)
            if self._over.wait(self._pulse):
                return

    def _seen(self) -> dict[int, Seen]:
        found = {}
        for rank in range(self._board.world):
            note = None if rank == self._board.rank else self._board.read("late", rank)
            if note is not None:
                found[rank] = Seen(Place(*note["place"]), note["beat"])
        return found


def _say(here: Place, before: dict[int, Seen], now: dict[int, Seen], board: Board, waited: float) -> None:
    others = [rank for rank in range(board.world) if rank != board.rank]
    moving = [rank for rank in others if rank in now and now[rank] != before.get(rank)]
    still = [
        rank for rank in others if rank in now and rank not in moving
    ]  # a note of this stall, or an old one
    silent = [rank for rank in still if now[rank].place.step >= here.step]
    missing = [rank for rank in others if rank not in moving + silent]
    elsewhere = [rank for rank in moving if now[rank].place[:2] != here[:2]]
    told = [f"{have(missing)} not entered {here}"] if missing else []
    told += [f"rank {rank} was in {_at(now[rank].place)} and is silent since" for rank in silent]
    told += [f"rank {rank} is in {_at(now[rank].place)}" for rank in elsewhere]
    if not told:
        told = [f"all ranks are in {_at(here)}: the link is slow or broken"]
    log.warning("%s (waited %.3g s)", "; ".join(told), waited)


def _at(place: Place) -> str:
    return f"{place}, {place.doing}"
