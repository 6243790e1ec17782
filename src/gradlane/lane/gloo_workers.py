"""Gloo's worker threads, and when it is safe to end them.

A worker needs the GIL to release the tensors of what it has just finished, and the destructor of a
group joins its workers while it holds the GIL. A group that is dropped in that moment hangs the process
for ever. The moment is short, but on a busy machine a worker may be off the CPU in the middle of it.

An interpreter that ends in that moment lets the worker not have the GIL any more, but ends its thread, in the
middle of a destructor: the process aborts ("terminate called without an active exception"). That can be the
worker of any group, of the framework's too, which are none of ours to destroy; so the end waits for them all.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
WORKER = "pt_gloo_runloop"
PAUSE = 0.002  # seconds without the GIL; enough to take a worker out of its wait for it
PATIENCE = 2.0
LAST_PATIENCE = 10.0  # at the end of the process, when nothing else is to be done
OURS = "gradlane"  # how the names of our own threads begin


def wait_for_idle_workers(patience: float = PATIENCE) -> None:
    """Return when all workers were seen asleep twice in a row, with the GIL free in between."""
    if not TASKS.is_dir():  # not Linux: nothing to look at
        time.sleep(25 * PAUSE)
        return
    deadline = time.monotonic() + patience
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


def _leave_in_peace() -> None:
    """The last thing that runs before the interpreter ends: no thread comes back from torch after this.

    Of our own threads those may be left that ask a store: whoever started them did not have to wait.
    """
    deadline = time.monotonic() + PATIENCE
    for thread in threading.enumerate():
        if thread.name.startswith(OURS):
            thread.join(max(0.0, deadline - time.monotonic()))
    wait_for_idle_workers(LAST_PATIENCE)


# Registered before all that closes lanes, and therefore run after it.
atexit.register(_leave_in_peace)
