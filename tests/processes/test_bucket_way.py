"""lane/README.md lists the files through which one bucket passes. The list is true."""

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.kernels.native import native
from gradlane.local import run_ranks

SOURCE = Path(gl.__file__).parent
README = (SOURCE / "lane" / "README.md").read_text()
STRATEGIES = ("Mean()", "ErrorFeedback(Sharded(Int4()))", "ErrorFeedback(PowerSGD(4))")
WARM_UP = 4  # steps: DDP has rebuilt its buckets, all buffers and memories are there
BUCKET = 1  # neither the first of a step nor the last
LATE = {"lane/watchdog.py", "agree/board.py", "agree/limits.py"}  # if a rank waits longer than a second


class Recorder:
    """The files of gradlane whose Python code runs: for one bucket, and in the whole step."""

    def __init__(self):
        self.recording = False
        self.of_bucket, self.of_step = set(), set()
        self._outermost = {}  # by thread: the frame in which our bucket is at work

    def __call__(self, frame, event, argument):
        if not self.recording:
            return
        thread = threading.get_ident()
        if event == "call":
            code = frame.f_code
            if thread not in self._outermost and self._begins(code.co_name, frame.f_locals):
                self._outermost[thread] = frame
            if code.co_filename.startswith(str(SOURCE)):
                path = str(Path(code.co_filename).relative_to(SOURCE))
                self.of_step.add(path)
                if thread in self._outermost:
                    self.of_bucket.add(path)
        elif event == "return" and self._outermost.get(thread) is frame:
            del self._outermost[thread]

    @staticmethod
    def _begins(name, variables):
        if name == "gradlane_hook":
            return variables["bucket"].index() == BUCKET
        return name == "_serve" and variables["job"].bucket.index == BUCKET


def files_passed(rank, text):
    """By one bucket, and by its whole step, on the hook's thread and on the lane's."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    recorder = Recorder()
    threading.setprofile(recorder)  # for the lane's thread, which attach starts
    try:
        with gl.attach(ddp, text, timeout=60):
            for step in range(WARM_UP + 1):
                recorder.recording = step == WARM_UP
                sys.setprofile(recorder if recorder.recording else None)
                optimizer.zero_grad()
                ddp(torch.randn(16, 64)).square().mean().backward()
                optimizer.step()
            recorder.recording = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorder.of_bucket, recorder.of_step


def listed(heading):
    """The files in the list under a heading of the README."""
    section = README.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return set(re.findall(r"^(?:\d+\.|-) `([\w/]+\.py)`", section, re.MULTILINE))


@pytest.fixture(scope="module", params=STRATEGIES)
def passed(request):
    if native() is None:
        pytest.skip("the list is of a run with compiled kernels")
    first, second = run_ranks(files_passed, 2, request.param)
    assert first == second
    return request.param, *first


def test_a_bucket_passes_the_files_of_the_readme(passed):
    text, of_bucket, _ = passed
    assert of_bucket == listed("Every strategy") | listed(f"`{text}`")


def test_a_step_runs_the_files_of_the_readme(passed):
    _, of_bucket, of_step = passed
    assert of_step - of_bucket - LATE == listed("Once a step") - of_bucket


def test_a_bucket_of_mean_passes_at_most_15_files():
    assert len(listed("Every strategy") | listed("`Mean()`")) <= 15
