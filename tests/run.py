"""Style, types, architecture and all tests, over all cores. Arguments go to pytest: -m "not slow".

One process per core and one more share the tests (support/split.py). The first prints as it goes; the output
of the others, and of the checks, follows at the end. Ctrl-C ends them all.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "tests", "examples", "benchmarks", "docs/conf.py")
BIN = Path(sys.executable).parent
CHECKS = {
    "style": (BIN / "ruff", "format", "--check", "--quiet", *SOURCES),
    "lint": (BIN / "ruff", "check", "--quiet", *SOURCES),
    "types": (BIN / "mypy",),
    "architecture": (BIN / "lint-imports",),
}
MOST_PROCESSES = 8  # of pytest; each needs some hundred MB


class Job:
    """A command in a process group of its own; its output goes to a file, or to the terminal where None."""

    def __init__(self, name, command, output=None):
        self.name, self.output = name, output
        with contextlib.ExitStack() as files:
            out = None if output is None else files.enter_context(output.open("wb"))
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    def passed(self):
        return self.process.wait() == 0

    def show(self):
        print(f"== {self.name}: {'passed' if self.passed() else 'failed'}", flush=True)
        if not self.passed():
            sys.stdout.buffer.write(self.output.read_bytes())
            sys.stdout.flush()

    def end(self):
        """Ask it to stop, as Ctrl-C does, then kill its group. Nothing if it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main(arguments):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores + 1, MOST_PROCESSES)  # one more than cores: tests with ranks often wait
    with tempfile.TemporaryDirectory(prefix="gradlane-tests-") as folder, contextlib.ExitStack() as ends:
        jobs = []

        def start(name, command, output=None):
            jobs.append(Job(name, command, output))
            ends.callback(jobs[-1].end)
            return jobs[-1]

        for name, command in CHECKS.items():
            start(name, command, Path(folder) / name)
        split = ("-p", "tests.support.split", f"--processes={count}", "-p", "no:cacheprovider")
        pytest = start("pytest", (sys.executable, "-m", "pytest", *split, *arguments))
        pytest.process.wait()
        for job in sorted(jobs[: len(CHECKS)], key=Job.passed, reverse=True):  # what failed comes last
            job.show()
        failed = [job.name for job in jobs if not job.passed()]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored by a job in a shell's background
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
