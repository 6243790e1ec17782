"""Errors on their way from a lane to the trainer."""

from __future__ import annotations

import contextlib
import sys
import traceback


class ConnectionBroke(Exception):
    """The backend failed, not the strategy; the cause tells how."""


def forget_groups(error: BaseException | None) -> None:
    """A traceback keeps the variables of its frames, and so the very groups that are to be closed."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__package__") == __package__:
                with contextlib.suppress(RuntimeError):  # still running: it has none
                    frame.clear()
        error = error.__cause__


def with_note(error: BaseException, note: str) -> BaseException:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} {note}", *error.args[1:])
    return error
