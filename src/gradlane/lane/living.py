"""The lanes of this process that are not closed, and those that are about to end by themselves."""

from __future__ import annotations

import gc
from threading import Thread
from weakref import WeakSet

from .base import Lane

MANY = 8
PATIENCE = 5.0  # seconds for a lane to end that nobody closed

_living: WeakSet[Lane] = WeakSet()
_leaving: set[Thread] = set()


def born(lane: Lane) -> None:
    _living.add(lane)


def ended(lane: Lane) -> None:
    _living.discard(lane)


def living_lanes() -> list[Lane]:
    """For whoever finds the process stuck, to ask them ``where``."""
    return list(_living)


def leaves(thread: Thread) -> None:
    _leaving.add(thread)


def left(thread: Thread) -> None:
    _leaving.discard(thread)


def wait_for_the_leaving() -> None:
    """Before the interpreter goes, or a process group: their connections must not be in the middle of their
    end then."""
    for thread in list(_leaving):
        thread.join(PATIENCE)


def make_room() -> None:
    """A model that is in a cycle of references goes with the next full collection, which may be far; until
    then its lane keeps threads and descriptors that Python's collector knows nothing of."""
    if len(_living) >= MANY:
        gc.collect()
