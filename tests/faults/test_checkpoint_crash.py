"""R16: whenever SIGKILL of one rank or of all cuts off a save, the old checkpoint or the new one is whole."""

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import RankFailed, run_ranks

from ..support.checkpoints import SMALL
from ..support.training import build, data
from .harness import SEED

STRATEGY = "ErrorFeedback(Sharded(Int4(block=32)))"
OURS = os.path.join("gradlane", "checkpoint")
OLD, NEW = 2, 3  # steps


class Lines:
    """Counts the lines of the checkpoint's code that are run, and calls ``at_last`` at one of them."""

    def __init__(self, last=None, at_last=None):
        self.count, self._last, self._at_last = 0, last, at_last

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        if OURS not in frame.f_code.co_filename:
            return None
        if event == "line":
            if self.count == self._last:
                self._at_last()
            self.count += 1
        return self._trace


def folder_of(rank, folder, own_disks):
    return Path(folder) / (f"disk-{rank}" if own_disks else "shared")


def two_saves(rank, folder, own_disks, victim, last, all_die):
    """Save the old checkpoint, then the new one, which is cut off at a line; how many lines it has if not."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=SMALL)
    path = folder_of(rank, folder, own_disks)
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    with gl.attach(ddp, STRATEGY, timeout=2) as attachment:
        for step in range(NEW):
            if step == OLD:
                attachment.save(path)
                keep_state(attachment, folder, rank, OLD)
            ddp(data(rank, step)).backward()
        keep_state(attachment, folder, rank, NEW)
        torch.distributed.barrier()
        with Lines(last if rank == victim else None, lambda: die(rank, folder, all_die)) as lines:
            attachment.save(path)
        if rank == victim:  # it polls, so that no two saves have as many lines: this one had fewer
            die(rank, folder, all_die)
    return lines.count


def keep_state(attachment, folder, rank, step):
    torch.save(attachment.strategy.state_dict(), Path(folder) / f"state-{rank}-{step}.pt")


def die(rank, folder, all_die):
    for other in range(2) if all_die else ():
        if other != rank:
            os.kill(int((Path(folder) / f"pid-{other}").read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def load_each(rank, cases):
    """For each: the step that was loaded, and whether it is what was saved there."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=SMALL)
    found = []
    with gl.attach(ddp, STRATEGY, timeout=20) as attachment:
        for folder, own_disks in cases:
            attachment.load(folder_of(rank, folder, own_disks))
            saved = torch.load(f"{folder}/state-{rank}-{attachment.step}.pt", weights_only=True)["memory"]
            mine = attachment.strategy.memory.state_dict()
            same = set(saved) == set(mine) and all(torch.equal(mine[name], saved[name]) for name in saved)
            found.append((attachment.step, same))
            attachment.save(folder_of(rank, folder, own_disks))  # and it can be written to again
            attachment.load(folder_of(rank, folder, own_disks))
            assert attachment.step == found[-1][0]
    return found


def check(folder, seed, points):
    chance = random.Random(seed)
    cases, kinds = [], Counter()
    lines = {}
    for own_disks in (False, True):
        whole = folder / f"whole-{own_disks}"
        whole.mkdir()
        lines[own_disks] = run_ranks(two_saves, 2, str(whole), own_disks, None, None, False)
    for point in range(points):
        own_disks, victim, all_die = chance.random() < 0.4, chance.randrange(2), chance.random() < 0.6
        count = lines[own_disks][victim]
        last = chance.randrange(0 if point % 2 else count * 2 // 3, count)  # half of them after the writing
        place = folder / f"{point}"
        place.mkdir()
        with pytest.raises(RankFailed, match="SIGKILL"):
            run_ranks(two_saves, 2, str(place), own_disks, victim, last, all_die)
        cases.append((str(place), own_disks))
        kinds[own_disks, victim, all_die] += 1
    ranks = run_ranks(load_each, 2, cases, deadline=120)
    steps = Counter(step for step, _ in ranks[0])
    print(f"seed {seed}: {points} kills in {lines} lines, old or new {dict(steps)}; {dict(kinds)}")
    assert ranks[0] == ranks[1]
    assert set(steps) <= {OLD, NEW}
    assert all(same for _, same in ranks[0])
    return steps


def test_killed_at_six_points(tmp_path):
    check(tmp_path, seed=5, points=6)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_killed_at_fifty_points(part, tmp_path):
    check(tmp_path, seed=50 * SEED + part, points=10)
