"""When a step fails on a device: what ranks say to each other through the store; the end of their groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from ..agree.board import Board, Document
from ..agree.deadline import within
from ..core.collectives import Scope
from ..errors import GradlaneError, PeerFailed, PeerLost, WrongState
from ..torch_internals import abort_group
from .failure import different_steps
from .peers import GRACE, READ_TIMEOUT, WRITE_TIMEOUT
from .stream_commit import Outcome

ABORTED = "aborted"


class StreamFailures:
    """A rank that fails a step says why, before it sends zeros. One that cannot send them aborts its groups:
    the others, which wait for its payloads on their devices, read that here, and abort theirs."""

    def __init__(self, groups: Mapping[Scope, Any], device: torch.device, board: Board | None) -> None:
        self._groups = groups
        self._device = device
        self._board = board
        self._steps = 0  # that have ended
        self._waits_since: float | None = None
        self.broken: str | None = None
        """Why the groups were aborted: nothing can be sent on them any more."""

    def refuse_if_broken(self) -> None:
        if self.broken is not None:
            raise WrongState(f"the process group was aborted ({self.broken}); start the job again")

    def report(self, where: str, error: BaseException, **more: object) -> None:
        note: Document = {
            "where": where,
            "type": type(error).__name__,
            "message": str(error)[:2000],
            "stopped_at": None,
            **more,
        }
        board = self._board
        if board is not None:
            with contextlib.suppress(Exception):  # the store may be gone, with the rank that hosted it
                within(WRITE_TIMEOUT, lambda: board.pin(self._topic, note), "the store")

    def stop(self, where: str, error: BaseException, position: list[int]) -> None:
        """This rank cannot send any more in this step. If all ranks have stopped at the same position, nobody
        waits for anybody; otherwise the groups are lost."""
        self.report(where, error, stopped_at=position)
        if self.broken is None and self._all_stopped(position):
            self._steps += 1
        else:
            self._end_groups(f"{where}: {type(error).__name__}: {error}")
            if (board := self._board) is not None:  # one note for all, however many ranks look for it
                with contextlib.suppress(Exception):
                    note = board.store(ABORTED)
                    within(WRITE_TIMEOUT, lambda: note.set(self._topic, str(board.rank)), "the store")

    def _all_stopped(self, position: list[int]) -> bool:
        others = [] if self._board is None else [r for r in range(self._board.world) if r != self._board.rank]
        until = time.monotonic() + GRACE
        while others and time.monotonic() < until:
            notes = [note for rank in others if (note := self._read(self._topic, rank)) is not None]
            stopped = [note["stopped_at"] for note in notes if note["stopped_at"] is not None]
            if any(at != position for at in stopped):
                return False
            if len(stopped) == len(others):
                return True
            time.sleep(0.02)
        return not others

    def _end_groups(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason
            for group in self._groups.values():
                with contextlib.suppress(RuntimeError):
                    abort_group(group, self._device)

    def of(self, outcome: Outcome) -> GradlaneError | None:
        """The error of a step on whose end all ranks have agreed; None if no rank has failed it."""
        topic, self._waits_since = self._topic, None
        self._steps += 1
        if outcome.first != outcome.last:
            return different_steps(outcome.first, outcome.last)
        if outcome.failed is None:
            return None
        return _peer_failed(outcome.failed, self._read(topic, outcome.failed))

    def watch(self) -> None:
        """While the host waits for the end of a step: raise if a rank has aborted, or if it takes long."""
        board, now = self._board, time.monotonic()
        if board is None:
            return
        if (rank := self._aborting_rank(board)) is not None:
            failed = _peer_failed(rank, self._read(self._topic, rank))
            self._end_groups(str(failed))
            raise failed
        self._waits_since = self._waits_since or now
        if now - self._waits_since > board.timeout:
            reason = f"the end of a step did not come within {board.timeout:g} s"
            self._end_groups(reason)
            raise PeerLost(f"{reason}: a rank is gone or stopped; if it was only slow, {board.limit.way_out}")

    def _aborting_rank(self, board: Board) -> int | None:
        def look() -> int | None:
            store, key = board.store(ABORTED), self._topic
            return int(store.get(key)) if store.check([key]) else None

        with contextlib.suppress(Exception):  # a store that does not answer says nothing
            return within(READ_TIMEOUT, look, "the store")
        return None

    def _read(self, topic: str, rank: int) -> Document | None:
        board = self._board
        if board is None:
            return None
        with contextlib.suppress(Exception):  # a store that does not answer says nothing
            return within(READ_TIMEOUT, lambda: board.read(topic, rank), "the store")
        return None

    @property
    def _topic(self) -> str:
        return f"failed/{self._steps}"


def _peer_failed(rank: int, note: Document | None) -> PeerFailed:
    if note is None:
        return PeerFailed(f"rank {rank} failed in this step; its own log says why", rank)
    return PeerFailed(f"rank {rank} raised {note['type']}: {note['message']} [in {note['where']}]", rank)
