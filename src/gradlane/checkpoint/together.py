"""All ranks do it, or none: each sends the others the outcome of its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..agree.board import Board, Document

SLOWEST = 10e6  # bytes per second of the slowest disk that is not a timeout


def patient(board: Board, size: int) -> Board:
    """The same board, with a longer time limit for a file of this size."""
    return board.allowing(board.limit.plus(size / SLOWEST))


def all_leave(board: Board, doing: str) -> None:
    """Ends a call that fails at its first meeting: no rank may call again while others are still in it."""
    board.agree(f"{doing}/left", {}, doing=doing)


def attempted(part: Callable[[], Document]) -> tuple[Document, BaseException | None]:
    """The note of this rank for the others: the result of its part, or why it failed."""
    try:
        return part(), None
    except Exception as error:  # noqa: BLE001  whatever it is, the others must not wait for this rank
        return {"failed": f"{error}"[:2000] or type(error).__name__}, error


def first_failure(notes: list[Document]) -> tuple[int, str] | None:
    """The first rank whose part failed, and why."""
    return next(((rank, str(note["failed"])) for rank, note in enumerate(notes) if "failed" in note), None)


def nothing(part: Callable[[], Any]) -> Callable[[], Document]:
    """A part without a result: its note is empty."""

    def done() -> Document:
        part()
        return {}

    return done
