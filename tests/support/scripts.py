"""Scripts as a user runs them, without the seconds that each process would need to import torch.

One process imports torch and waits; for each script it forks one process per rank. A rank runs the script as
``__main__`` and ends as any interpreter ends: with atexit, the threads' ends and the teardown of modules.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = Path(__file__).with_name("script_server.py")
COMMAND = Path(__file__).with_name("gradlane_command.py")


def gradlane(*arguments, ranks=None, **environ):
    """``python -m gradlane ARGUMENTS``, with these variables of the environment."""
    return run(COMMAND, *arguments, ranks=ranks, environ=environ)


def run(script, *arguments, ranks=None, timeout=120, warnings=None, environ=None):
    """Run ``script`` on ``ranks`` ranks with the environment of torchrun, or alone where None.

    Like ``subprocess.run(capture_output=True, text=True)``. The exit code is that of the first that failed.
    """
    with tempfile.TemporaryDirectory(prefix="gradlane-script-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        request = {
            "script": str(script), "arguments": arguments, "ranks": ranks, "timeout": timeout,
            "warnings": warnings, "environ": environ or {}, "out": str(out), "err": str(err),
        }  # fmt: skip
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess([str(script), *arguments], code, out.read_text(), err.read_text())


@functools.cache
def _server():
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    server = subprocess.Popen(
        [sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(_end, server, os.getpid())
    return server


def _end(server, owner):
    if os.getpid() == owner:  # and not in a rank that was forked
        server.kill()
        server.wait()
