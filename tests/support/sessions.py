"""Commands in a session of their own, which leave nothing behind when a test fails."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from .leftovers import members

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def started(command, **options):
    """The process, with text pipes for its output. At the end all of its session is killed."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **{"cwd": ROOT, **options},
    )
    try:
        yield process
    finally:
        for pid in {process.pid, *members(process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        process.stderr.close()
