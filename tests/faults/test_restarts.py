"""R20: torchrun restarts killed workers, and training ends with the weights of an undisturbed run."""

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import gradlane as gl
from gradlane.local import run_ranks

from ..support.leftovers import children, gone
from .harness import drawing

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.py"
STRATEGY = "ErrorFeedback(Sharded(Int4()))"
STEPS, EVERY = 300, 20


class Job:
    """The example under torchrun, in a session of its own, with its lines as they come."""

    def __init__(self, folder, *, ranks=2, steps=STEPS, restarts=3, script=SCRIPT):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        options = [
            "--strategy",
            STRATEGY,
            "--folder",
            str(folder),
            "--steps",
            str(steps),
            "--every",
            str(EVERY),
        ]
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "--max-restarts", str(restarts), str(script), *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lines = []
        self._seen = set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def find(self, pattern):
        return [found for line in self.lines if (found := re.search(pattern, line))]

    def wait_for(self, pattern, count=1, seconds=60):
        assert gone(lambda: len(self.find(pattern)) >= count or self.process.poll() is not None, seconds), (
            self.lines
        )
        found = self.find(pattern)
        assert len(found) >= count, "\n".join(self.lines)
        return found[count - 1]

    def workers(self):
        """Those that run now; each has a session of its own."""
        found = children(self.process.pid)
        self._seen |= set(found)
        return found

    def end(self, seconds=120):
        """The hash of the final weights; no worker is left."""
        try:
            self.workers()
            self.process.wait(seconds)
        finally:
            for pid in [*self.workers(), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self._reader.join()
            self.process.stdout.close()
        assert self.process.returncode == 0, "\n".join(self.lines[-60:])
        assert gone(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self._seen))
        return self.wait_for(r"weights (\w+)")[1]


def undisturbed(folder, steps=STEPS, ranks=2):
    """The lines of the example without torchrun, in forked ranks: the same training, started sooner."""
    return run_ranks(in_one_go, ranks, folder, steps)[0]


def in_one_go(rank, folder, steps):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        runpy.run_path(str(SCRIPT))["train"](folder, STRATEGY, steps, EVERY)
    return lines.getvalue()


def disturbed(folder, chance, kills):
    """Kill a worker at random points; the hash, and the steps lost to each kill."""
    job = Job(folder)
    lost = []
    for kill in range(kills):
        start = int(job.wait_for(r"attempt (\d+): 2 workers from step (\d+)", kill + 1)[2])
        seen = min(STEPS - 20, start + 10 * chance.randrange(1, 5))
        job.wait_for(rf"step {seen}: loss", 1)
        time.sleep(chance.uniform(0, 0.05))
        victim = chance.choice(job.workers())
        reached = max(int(found[1]) for found in job.find(r"step (\d+): loss"))
        os.kill(victim, signal.SIGKILL)
        resumed = int(job.wait_for(r"attempt (\d+): 2 workers from step (\d+)", kill + 2)[2])
        print(f"killed after step {reached}, resumed from {resumed}")
        lost.append(reached - resumed)
    return job.end(), lost


@pytest.mark.slow
def test_three_restarts(tmp_path):
    chance = drawing("restart")
    calm = re.search(r"weights (\w+)", undisturbed(tmp_path / "calm"))[1]
    weights, lost = disturbed(tmp_path / "disturbed", chance, 3)
    assert weights == calm
    assert len(lost) == 3
    assert max(lost) <= EVERY
    print(f"3 restarts, {max(lost)} steps lost at most; the final weights are those of the undisturbed run")


@pytest.mark.slow
def test_another_number_of_workers_goes_on(tmp_path):
    """And plain torchrun, without restarts."""
    few = undisturbed(tmp_path, 40)
    more = Job(tmp_path, ranks=3, restarts=0, steps=80)
    more.end()
    assert more.wait_for(r"attempt 0: (\d) workers from step (\d+)")[0].endswith("3 workers from step 40")
    first, later = (
        float(re.search(r"step \d+: loss ([\d.]+)", text)[1]) for text in (few, "\n".join(more.lines))
    )
    assert later < first / 2


def test_outside_of_torchrun_it_says_what_to_do(monkeypatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(gl.WrongState, match=r"RANK.*TORCHELASTIC_RUN_ID.*torchrun --nproc-per-node 2"):
        gl.init_elastic("gloo")
    assert not dist.is_initialized()


def test_what_torchrun_decides_is_refused():
    with pytest.raises(gl.InvalidValue, match="takes rank, store from the environment"):
        gl.init_elastic("gloo", rank=0, store=dist.HashStore())
