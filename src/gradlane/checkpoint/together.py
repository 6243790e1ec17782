"""All ranks do it, or none: each tells the others whether its part went well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..agree.board import Board, Document

SLOWEST = 10e6  # bytes per second that a disk is given time for


def patient(board: Board, size: int) -> Board:
    """The same ranks, with time for a file of this size."""
    return board.allowing(board.limit.plus(size / SLOWEST))


def all_leave(board: Board, doing: str) -> None:
    """For a call that ends at its first meeting: nobody may come again while others are still in it."""
    board.agree(f"{doing}/left", {}, doing=doing)


def attempted(part: Callable[[], Document]) -> tuple[Document, BaseException | None]:
    """What a rank tells the others: what its part gave, or why it failed."""
    try:
        return part(), None
    except Exception as error:  # noqa: BLE001  whatever it is, the others must not wait for this rank
        return {"failed": f"{error}"[:2000] or type(error).__name__}, error


def first_failure(notes: list[Document]) -> tuple[int, str] | None:
    """The first rank whose part failed, and why."""
    return next(((rank, str(note["failed"])) for rank, note in enumerate(notes) if "failed" in note), None)


def nothing(part: Callable[[], Any]) -> Callable[[], Document]:
    """A part that gives the others nothing but that it was done."""

    def done() -> Document:
        part()
        return {}

    return done
