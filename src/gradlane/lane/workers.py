"""Gloo's worker threads, and when it is safe to end them.

A worker needs the GIL to release the tensors of what it has just finished, and the destructor of a
group joins its workers while it holds the GIL. A group that is dropped in that moment hangs the process
for ever. The moment is short, but on a busy machine a worker may be off the CPU in the middle of it.
"""

from __future__ import annotations

import time
from pathlib import Path

TASKS = Path("/proc/self/task")
WORKER = "pt_gloo_runloop"
PAUSE = 0.002  # seconds without the GIL; enough to take a worker out of its wait for it
PATIENCE = 2.0


def wait_for_idle_workers() -> None:
    """Return when all workers were seen asleep twice in a row, with the GIL free in between."""
    if not TASKS.is_dir():  # not Linux: nothing to look at
        time.sleep(25 * PAUSE)
        return
    deadline = time.monotonic() + PATIENCE
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
