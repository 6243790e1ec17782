"""Who is late: a rank that waits writes where it is, reads where the others are, and logs it once."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..agree.board import Board, have
from ..agree.limits import late_after
from ..core.running import Running
from ..core.strategy import Reduced
from ..log import log

ROLL_CALL, FORWARD = -1, -2
"""Instead of a bucket: how a step begins in a loop without DDP, and with DDP."""
HEARTBEAT = 1.0  # seconds between two notes, at most


class Position(NamedTuple):
    """Where a lane is. All lanes pass the same positions, so ``(step, progress)`` can be compared."""

    step: int
    progress: int
    """How far it is in the step."""
    bucket: int
    doing: str

    def __str__(self) -> str:
        others = {ROLL_CALL: "the roll call", FORWARD: "the forward"}
        return f"{others.get(self.bucket, f'bucket {self.bucket}')} of step {self.step}"


Where = Callable[[], Position | None]


def position_of(serving: Running | None, progress: int) -> Position | None:
    """``progress`` counts the waits of this step that began and those that ended: it is odd during one."""
    if serving is None:
        return None
    if isinstance(serving.state, Reduced):
        doing = "at the end of the step"
    elif progress % 2:
        doing = serving.doing()
    else:
        doing = f"at work after {serving.doing()}" if progress else "at work"
    return Position(serving.bucket.step, progress, serving.bucket.index, doing)


class Seen(NamedTuple):
    """A rank's last note: its position, and how many notes it has written."""

    position: Position
    notes: int


def heartbeat(timeout: float) -> float:
    """Seconds between two notes of a rank that waits."""
    return min(HEARTBEAT, late_after(timeout) / 8)


@contextlib.contextmanager
def watched(board: Board, where: Where) -> Iterator[None]:
    """Log who is late while this context lasts.

    Enter it only when a wait is longer than a heartbeat. The store is read on a thread of its own, which ends
    with the wait: a store may not answer, and signal handlers must run on the waiting thread.
    """
    ended = threading.Event()
    watcher = threading.Thread(target=watch, args=(board, where, ended), name="gradlane-late", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()


def watch(board: Board, where: Where, ended: threading.Event) -> None:
    """Log who is late until the wait has ``ended``."""
    _Watch(board, where, ended).run()


class _Watch:
    def __init__(self, board: Board, where: Where, ended: threading.Event) -> None:
        self._board = board
        self._where = where
        self._ended = ended
        self._heartbeat = heartbeat(board.timeout)
        self._late_after = late_after(board.timeout)

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store may be gone; the lane reports that
            self._watch()

    def _watch(self) -> None:
        here = self._where()
        since, notes = time.monotonic() - self._heartbeat, 0
        before: dict[int, Seen] | None = None
        logged = False
        while True:
            position = self._where()
            if position != here:  # it makes progress: slow, but not stuck
                here, since, before, logged = position, time.monotonic(), None, False
            if here is not None:
                notes += 1
                self._board.pin("late", {"position": list(here), "notes": notes})
                waited = time.monotonic() - since
                if before is None and waited > self._late_after - 4 * self._heartbeat:
                    before = self._seen()
                elif before is not None and not logged and waited > self._late_after:
                    logged = True
                    _log(here, before, self._seen(), self._board, waited)
            if self._ended.wait(self._heartbeat):
                return

    def _seen(self) -> dict[int, Seen]:
        found = {}
        for rank in range(self._board.world):
            note = None if rank == self._board.rank else self._board.read("late", rank)
            if note is not None:
                found[rank] = Seen(Position(*note["position"]), note["notes"])
        return found


def _log(here: Position, before: dict[int, Seen], now: dict[int, Seen], board: Board, waited: float) -> None:
    others = [rank for rank in range(board.world) if rank != board.rank]
    waiting = [rank for rank in others if rank in now and now[rank] != before.get(rank)]  # they write notes
    # The last note of the others is from this wait, or from an earlier one.
    quiet = [rank for rank in others if rank in now and rank not in waiting]
    silent = [rank for rank in quiet if now[rank].position.step >= here.step]
    missing = [rank for rank in others if rank not in waiting + silent]
    elsewhere = [rank for rank in waiting if now[rank].position[:2] != here[:2]]
    messages = [f"{have(missing)} not entered {here}"] if missing else []
    messages += [f"rank {rank} was in {_at(now[rank].position)} and is silent since" for rank in silent]
    messages += [f"rank {rank} is in {_at(now[rank].position)}" for rank in elsewhere]
    if not messages:
        messages = [f"all ranks are in {_at(here)}: the link is slow or broken"]
    log.warning("%s (waited %.3g s)", "; ".join(messages), waited)


def _at(position: Position) -> str:
    return f"{position}, {position.doing}"
