"""How Linux schedules Gloo's event loops: they do not take the processor from who holds a lock.

A thread of Gloo holds the lock of a connection while it sends. On one machine the kernel delivers at once,
and wakes the event loop that receives. That may take the processor of the sender. The event loop of the
sender's own connection then finds its lock taken and asks again and again, until the next tick of the timer
lets the sender go on. So an all-reduce of 24 bytes takes 4 ms now and then, and most of a processor.

A thread with the policy ``SCHED_BATCH`` does not take the processor of a running thread when it wakes. It
keeps its share of the processor, and no rights are needed to set it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from ..errors import InvalidValue
from .gloo_workers import TASKS

VARIABLE = "GRADLANE_GLOO_THREADS"
CHOICES = ("batch", "normal")
EVENT_LOOP = "gloo_tcp_loop"
NAMED_WITHIN = 0.1  # seconds: a new thread names itself when it first runs
Group = TypeVar("Group")


def check_choice() -> None:
    choice = _choice()
    if choice not in CHOICES:
        raise InvalidValue(
            f"{VARIABLE}={choice!r} is not known; use one of {', '.join(CHOICES)}, or unset it"
        )


def connected(connect: Callable[[], Group]) -> Group:
    """A new group of Gloo, whose event loop is a batch thread, as all others of this process are then.

    GRADLANE_GLOO_THREADS=normal leaves them as they are. So does a policy that somebody else has set.
    """
    if _choice() != "batch":
        return connect()
    before = len(event_loops())
    group = connect()
    until = time.monotonic() + NAMED_WITHIN
    while TASKS.is_dir() and len(event_loops()) == before and time.monotonic() < until:
        time.sleep(0.001)
    schedule_in_batches()
    return group


def schedule_in_batches() -> None:
    """Set the policy of all event loops that this process has, those of torch's own groups too."""
    if _choice() == "batch" and hasattr(os, "SCHED_BATCH"):
        _change(os.SCHED_OTHER, os.SCHED_BATCH)


@contextmanager
def scheduled_as_usual() -> Iterator[None]:
    """As torch leaves its threads: to measure what it does without us."""
    if hasattr(os, "SCHED_BATCH"):
        _change(os.SCHED_BATCH, os.SCHED_OTHER)
    try:
        yield
    finally:
        schedule_in_batches()


def event_loops() -> list[int]:
    """Ids of the threads; none where the system does not tell."""
    found = []
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with suppress(OSError):  # it has just ended
            if task.joinpath("comm").read_text().strip() == EVENT_LOOP:
                found.append(int(task.name))
    return found


def _choice() -> str:
    return os.environ.get(VARIABLE, "batch")


def _change(before: int, after: int) -> None:
    for thread in event_loops():
        with suppress(OSError):  # it has just ended; or a sandbox forbids it, and all works without
            if os.sched_getscheduler(thread) == before:
                os.sched_setscheduler(thread, after, os.sched_param(0))
