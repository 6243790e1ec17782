"""The open sessions of this process."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

from ..lane.base import join_ending_threads


class Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def register(session: Closable) -> None:
    _open.add(session)


def unregister(session: Closable) -> None:
    _open.discard(session)


def close_all() -> None:
    """Close all sessions that are still open."""
    for session in list(_open):
        session.close()
    join_ending_threads()


# A lane that is open when the interpreter exits could crash it, and users forget to close.
atexit.register(close_all)
