"""Errors on their way from a lane to the trainer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from ..core.running import Driver
from ..errors import RanksDisagree


class ConnectionBroke(Exception):
    """The backend failed, not the strategy; ``__cause__`` is its error."""


def forget_groups(error: BaseException | None) -> None:
    """Drop the variables that the traceback keeps alive, and with them the groups that are to be closed.

    Else the peers would wait for a rank that has failed. A traceback keeps the variables of its frames.
    ``clear`` drops them, but not those that a nested function closes over: such a frame is removed. Before
    Python 3.12 a comprehension is a nested function.
    """
    while error is not None:
        kept = [step for step in _steps(error.__traceback__) if not _is_closure_of_ours(step.tb_frame)]
        for step, following in zip(kept, [*kept[1:], None], strict=True):
            step.tb_next = following
        error.__traceback__ = kept[0] if kept else None
        for step in kept:
            if _is_ours(step.tb_frame):
                with contextlib.suppress(RuntimeError):  # still running
                    step.tb_frame.clear()
        error = error.__cause__


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(frame: FrameType) -> bool:
    """Of a lane, or of the loop that it inherits."""
    found = frame.f_globals
    return found.get("__package__") == __package__ or found.get("__name__") == Driver.__module__


def _is_closure_of_ours(frame: FrameType) -> bool:
    return _is_ours(frame) and bool(frame.f_code.co_freevars)


def different_steps(first: int, last: int) -> RanksDisagree:
    return RanksDisagree(
        f"the ranks are in different steps, from {first} to {last}: one of them ran a backward pass more "
        "than another; every rank must take the same number of steps (DDP has join() for uneven data)"
    )


def with_note(error: BaseException, note: str) -> BaseException:
    """``error.add_note``, which Python 3.10 does not have."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} {note}", *error.args[1:])
    return error
