"""R13 and R14: long runs do not grow, and many short ones leave nothing behind."""

import gc
import os
import threading
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.catalogue import STRATEGIES
from ..support.training import build, data
from .harness import SEED, run

PAGE = os.sysconf("SC_PAGE_SIZE")
MEGA = 2**20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def threads():
    return sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def soak(rank, name, steps, settled):
    """Resident bytes from ``settled`` on, sampled; threads and descriptors then and at the end."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
    sizes = []
    with gl.attach(ddp, STRATEGIES[name](), timeout=60, observer=lambda event: None) as attachment:
        for step in range(steps):
            optimizer.zero_grad()
            ddp(data(rank, step % 50)).backward()
            optimizer.step()
            attachment.metrics()
            if step == settled:
                gc.collect()
                before = threads(), descriptors()
            if step >= settled and step % 25 == 0:
                sizes.append(resident())
        after = threads(), descriptors()
    return sizes, before, after


def check(name, steps, settled, deadline):
    for sizes, before, after in run_ranks(soak, 2, name, steps, settled, deadline=deadline):
        quarter = sizes[-len(sizes) // 4 :]
        grown, lately = max(sizes) - sizes[0], quarter[-1] - quarter[0]
        print(
            f"{name}, {steps} steps: {grown / MEGA:+.2f} MB since {settled}, {lately / MEGA:+.2f} MB lately"
        )
        assert grown <= 8 * MEGA
        assert lately <= 1 * MEGA
        assert before == after


def test_four_hundred_steps_do_not_grow():
    check("int4 feedback", 400, 100, 60)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_ten_thousand_steps_do_not_grow():
    """With another FAULT_SEED, another strategy."""
    check(("int4 feedback", "mean", "powersgd")[(SEED - 1) % 3], 10_000, 500, 450)


LIVES = ("mean", "int4 feedback", "powersgd", "ef21", "mixed")


def one_life(rank, store, name):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    ddp = DistributedDataParallel(build(depth=2), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    attachment = gl.attach(ddp, STRATEGIES[name](), timeout=20)
    for step in range(3):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        optimizer.step()
    attachment.close()


def many_lives(rank, path, cycles):
    """Init, three steps, close, destroy, over and over; every other time without gradlane's own shutdown."""
    store = dist.FileStore(path, 2)
    for number, name in enumerate(islice(cycle(LIVES), cycles)):
        one_life(rank, dist.PrefixStore(str(number), store), name)
        if number % 2:
            gl.shutdown()
        else:
            gc.collect()
            dist.barrier()
            dist.destroy_process_group()
        if number == len(LIVES) - 1:
            before = threads(), descriptors()
    lanes = [thread.name for thread in threading.enumerate() if thread.name.startswith("gradlane")]
    return before, (threads(), descriptors()), lanes


@pytest.mark.parametrize("cycles", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_many_lives_end_well(cycles):
    story = run(many_lives, 2, cycles, deadline=200)
    assert story.codes == {0: 0, 1: 0}, story.failures
    print(f"{cycles} lives, exit codes {list(story.codes.values())}")
    for before, after, lanes in story.results.values():
        assert lanes == []
        assert before == after
        assert not any("gloo" in name for name in after[0])
