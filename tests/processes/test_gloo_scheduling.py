"""Event loops of Gloo are batch threads while a lane works with them, and only they."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.bench.arm_processes import ArmProcesses
from gradlane.lane.gloo_scheduling import EVENT_LOOP, VARIABLE, scheduled_as_usual
from gradlane.lane.gloo_workers import WORKER
from gradlane.local import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="SCHED_BATCH is of Linux")


def policies():
    """Of Gloo's threads in this process, by name."""
    found = {EVENT_LOOP: set(), WORKER: set()}
    for task in Path("/proc/self/task").iterdir():
        name = task.joinpath("comm").read_text().strip()
        if name in found:
            found[name].add(os.sched_getscheduler(int(task.name)))
    return found


def of_loops(policy):
    return {EVENT_LOOP: {policy}, WORKER: {os.SCHED_OTHER}}


@dataclass
class FailsOnce(gl.Strategy):
    rank: int

    async def reduce(self, bucket):
        mean = await gl.all_reduce(bucket.flat, op="mean")
        if bucket.step == 1 and bucket.rank == self.rank:
            raise ValueError("on purpose")
        return gl.Reduced(mean)


def trained(rank, choice):
    if choice is not None:
        os.environ[VARIABLE] = choice
    ddp = DistributedDataParallel(torch.nn.Linear(8, 4))
    ddp(torch.ones(2, 8)).sum().backward()  # forms the connections of torch's own group
    found = [policies()]
    with gl.attach(ddp, FailsOnce(1), timeout=30):
        found.append(policies())
        with scheduled_as_usual():
            found.append(policies())
        for step in range(3):
            try:
                ddp(torch.full((2, 8), float(rank))).sum().backward()
            except (ValueError, gl.PeerFailed):
                assert step == 1
        found.append(policies())  # the failed step closed the lane's groups, the next formed new ones
    return found, [p.grad for p in ddp.parameters()]


def test_all_of_them_are_also_after_a_failure_and_torchs_too():
    usual, batch = (of_loops(policy) for policy in (os.SCHED_OTHER, os.SCHED_BATCH))
    for found, _ in run_ranks(trained, 3, None):
        assert found == [usual, batch, usual, batch]


def test_they_stay_as_they_are_on_request_and_the_gradients_are_the_same():
    usual = of_loops(os.SCHED_OTHER)
    both = run_ranks(trained, 2, "normal"), run_ranks(trained, 2, "batch")
    assert all(found == [usual] * 4 for found, _ in both[0])
    for (_, normal), (_, batch) in zip(*both, strict=True):
        assert all(map(torch.equal, normal, batch))


def misspelt(rank):
    if rank == 1:
        os.environ[VARIABLE] = "fifo"
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    with pytest.raises(gl.GradlaneError, match=r"GRADLANE_GLOO_THREADS='fifo'.* batch, normal"):
        gl.attach(ddp, "Mean()", timeout=30)


def test_another_choice_is_refused_on_all_ranks():
    run_ranks(misspelt, 2)


def counts_its_seconds(rank):
    return lambda order: sum(map(float, os.times()[:2]))


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_arms_are_stopped_between_their_steps():
    arm = ArmProcesses(counts_its_seconds, 2)
    try:
        ranks = [process.pid for process in arm._ranks.processes]
        until = time.monotonic() + 10  # they stop when they are back in the kernel
        while [state_of(pid) for pid in ranks] != ["T", "T"]:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(arm.step(None, 10, "first")) == len(arm.step(None, 10, "second")) == 2
    finally:
        arm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
