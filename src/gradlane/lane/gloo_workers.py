"""Gloo's worker threads, and when it is safe to end them.

A worker needs the GIL to release the tensors of a collective that it has just finished. The destructor of a
group joins its workers while it holds the GIL. If a group is dropped in that moment, the process hangs for
ever. The moment is short, but on a busy machine a worker may be off the CPU in the middle of it.

If the interpreter ends in that moment, it ends the thread of the worker in the middle of a destructor, and
the process aborts ("terminate called without an active exception"). This can be a worker of any group, also
of a group of the framework, which is not ours to destroy. So the end of the process waits for all workers.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
WORKER = "pt_gloo_runloop"
PAUSE = 0.002  # seconds without the GIL; enough to take a worker out of its wait for it
IDLE_TIMEOUT = 2.0  # seconds
EXIT_TIMEOUT = 10.0  # seconds, at the end of the process
OURS = "gradlane"  # how the names of our own threads begin


def wait_for_idle_workers(timeout: float = IDLE_TIMEOUT) -> None:
    """Return when all workers were seen asleep twice in a row, with the GIL free in between."""
    if not TASKS.is_dir():  # not Linux: their state is unknown
        time.sleep(25 * PAUSE)
        return
    deadline = time.monotonic() + timeout
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(PAUSE)
        quiet = quiet + 1 if all_workers_sleep() else 0


def all_workers_sleep() -> bool:
    for task in TASKS.iterdir():
        try:
            if task.joinpath("comm").read_text().strip() != WORKER:
                continue
            state = task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has just ended
            continue
        if state != "S":
            return False
    return True


def _wait_at_exit() -> None:
    """Runs last before the interpreter ends: no thread returns from torch after this.

    Threads of ours that wait for a store may still run: the code that started them has stopped waiting.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT
    for thread in threading.enumerate():
        if thread.name.startswith(OURS):
            thread.join(max(0.0, deadline - time.monotonic()))
    wait_for_idle_workers(EXIT_TIMEOUT)


# Registered before everything that closes lanes, so it runs after that.
atexit.register(_wait_at_exit)
