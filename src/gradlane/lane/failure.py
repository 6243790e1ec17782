"""Errors on their way from a lane to the trainer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType


class ConnectionBroke(Exception):
    """The backend failed, not the strategy; the cause tells how."""


def forget_groups(error: BaseException | None) -> None:
    """A traceback keeps the variables of its frames, and so the very groups that are to be closed: its peers
    would wait for a rank that has failed. Of a function within another it keeps what that closes over too,
    and no ``clear`` reaches there: such a frame goes. A comprehension is one before Python 3.12."""
    while error is not None:
        kept = [step for step in _steps(error.__traceback__) if not _is_closure_of_ours(step.tb_frame)]
        for step, following in zip(kept, [*kept[1:], None], strict=True):
            step.tb_next = following
        error.__traceback__ = kept[0] if kept else None
        for step in kept:
            if _is_ours(step.tb_frame):
                with contextlib.suppress(RuntimeError):  # still running: it has none
                    step.tb_frame.clear()
        error = error.__cause__


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__package__") == __package__


def _is_closure_of_ours(frame: FrameType) -> bool:
    return _is_ours(frame) and bool(frame.f_code.co_freevars)


def with_note(error: BaseException, note: str) -> BaseException:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} {note}", *error.args[1:])
    return error
