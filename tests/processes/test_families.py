"""Ranks may have children; however it ends, none of them is left."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gradlane.local import RankFailed, run_ranks, tell

from ..support.leftovers import children, gone, members


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, get_worker_info().id])


def loads(rank):
    return torch.cat(list(DataLoader(Numbers(), batch_size=3, num_workers=2))).tolist()


def test_a_rank_may_load_with_workers():
    before = children(os.getpid())
    for batches in run_ranks(loads, 2):
        assert [index for index, _ in batches] == list(range(12))
        assert {worker for _, worker in batches} == {0, 1}
    assert children(os.getpid()) == before


BUSY = """
import multiprocessing, os, subprocess, sys, time
from gradlane.local import run_ranks, tell

def busy(rank):
    own = multiprocessing.Process(target=time.sleep, args=(600,))
    own.start()
    other = subprocess.Popen(["sleep", "600"])
    tell((os.getpid(), own.pid, other.pid))
    time.sleep(600)

reported = []
def on_report(pids):
    reported.append(pids)
    if len(reported) == 2:
        print("ready", *(pid for pids in reported for pid in pids), flush=True)
        if "raise" in sys.argv:
            raise KeyError("on the way")

run_ranks(busy, 2, deadline=600, on_report=on_report)
"""


def alive(pids):
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize(
    "how",
    [
        "killed",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("interrupted", "terminated", "raise")),
    ],
)
def test_nothing_is_left_however_the_parent_ends(how):
    run = [sys.executable, "-c", BUSY, how]
    parent = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              start_new_session=True)  # fmt: skip
    try:
        word, *pids = parent.stdout.readline().split()
        pids = list(map(int, pids))
        assert word == "ready"
        assert len(pids) == 6
        if how == "raise":
            assert gone(lambda: parent.poll() is not None)
        else:
            assert len(alive(pids)) == 6
            signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "interrupted": signal.SIGINT}
            parent.send_signal(signals[how])
        assert parent.wait(20) != 0
        assert gone(lambda: not alive(pids)), alive(pids)
        assert gone(lambda: not members(parent.pid)), members(parent.pid)  # the keeper too
    finally:
        for pid in [parent.pid, *members(parent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()


def leaves_one_behind(rank):
    tell(subprocess.Popen(["sleep", "600"]).pid)
    if rank == 0:
        raise KeyError("this rank")


def test_children_of_ranks_that_fail_or_finish_are_ended():
    pids = []
    with pytest.raises(RankFailed, match="this rank"):
        run_ranks(leaves_one_behind, 2, deadline=30, on_report=pids.append)
    assert len(pids) == 2
    assert gone(lambda: not alive(pids))
