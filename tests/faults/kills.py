"""A blow that befalls one of four ranks in training, and what the survivors have to say about it."""

import random
import re
import signal
import time
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import tell

from ..support.catalogue import EVERY
from ..support.training import build, data
from .faulty import MOMENTS, Faulty, Point
from .harness import Run, Warnings, connect, leave_the_lost

WORLD = 4
STEPS = 60  # more than any fault lets happen
SAVED = 2  # the step before which a checkpoint is written, and with which faults begin


@dataclass(frozen=True)
class Blow:
    """What befalls whom: at a point of its strategy, or so many seconds after a step has begun."""

    rank: int
    step: int
    point: Point | None
    delay: float

    @classmethod
    def drawn(cls, chance: random.Random) -> "Blow":
        # Not in DDP's own collectives, in its constructor and its second forward: they are not ours.
        point = Point.drawn(chance, WORLD, moments=MOMENTS, steps=(SAVED, 6))
        by_clock = chance.random() < 0.5
        return cls(point.rank, point.step, None if by_clock else point, chance.uniform(0, 0.05))


def strategy_of(name, blow, what):
    strategy = EVERY[name]()
    if blow.point is None:
        return strategy
    if isinstance(strategy, gl.LocalSteps):
        return strategy.with_inner(Faulty(strategy.inner, blow.point, what))
    return Faulty(strategy, blow.point, what)


def opened(ddp, optimizer, strategy, timeout):
    """Many small buckets, in a step or in a round of local steps."""
    if isinstance(strategy, gl.LocalSteps):
        return gl.local_steps(ddp, optimizer, strategy, bucket_mb=0.004, timeout=timeout)
    return gl.attach(ddp, strategy, timeout=timeout)


def train_until_lost(rank, path, name, blow, what, timeout, folder=None):
    warnings = Warnings()
    connect(rank, path, WORLD)
    story = _train(rank, name, blow, what, timeout, folder)
    leave_the_lost()
    return *story, [line for _, line in warnings.lines]


def _train(rank, name, blow, what, timeout, folder):
    """When which error came, whom it names, and in which step."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    attachment = opened(ddp, optimizer, strategy_of(name, blow, what), timeout)
    try:
        for step in range(STEPS):
            if folder is not None and step == SAVED:
                attachment.save(folder)
            if rank == blow.rank and step == blow.step:
                tell(("begun", step))
            optimizer.zero_grad()
            ddp(data(rank, step)).backward()
            optimizer.step()
    except gl.PeerLost as error:
        return time.monotonic(), str(error), error.rank, step
    finally:
        attachment.close()
    raise AssertionError(f"rank {rank} has trained through {STEPS} steps")


def begin(name, blow, what, timeout, folder=None):
    print(name, blow)

    def on_report(running, report):
        if report[0] == "begun" and blow.point is None:
            time.sleep(blow.delay)
            running.signal(blow.rank, what)

    how = "kill" if what == signal.SIGKILL else "stop"
    return Run(
        train_until_lost, WORLD, name, blow, how, timeout, folder, deadline=40, victim=blow.rank,
        on_report=on_report,
    )  # fmt: skip


def all_survived(story, blow):
    """All but the victim have something to say, and end with exit code 0."""
    assert set(story.results) == set(range(WORLD)) - {blow.rank}, story.failures
    for rank in story.results:
        assert story.codes[rank] == 0, f"rank {rank} ended with {story.codes[rank]}"


def killed(story, blow):
    """The seconds until the last survivor had raised."""
    all_survived(story, blow)
    assert story.codes[blow.rank] == -signal.SIGKILL
    for when, message, lost, step, _ in story.results.values():
        assert when - story.fired < 5, f"after {when - story.fired:.2f} s: {message}"
        assert lost == blow.rank, message
        assert f"rank {blow.rank}" in message
        assert step >= blow.step
    return max(when - story.fired for when, *_ in story.results.values())


def kill_one(name, blow):
    return killed(begin(name, blow, signal.SIGKILL, timeout=20).ended(), blow)


def stop_one(name, blow):
    story = begin(name, blow, signal.SIGSTOP, timeout=5).ended()
    all_survived(story, blow)
    assert story.victim_state == "T"
    for when, message, lost, _, lines in story.results.values():
        assert 4 < when - story.fired < 7, f"after {when - story.fired:.2f} s: {message}"
        assert lost == blow.rank, message
        assert f"rank {blow.rank}" in message
        if blow.rank != 0:  # which hosts the store, through which the others would learn who is late
            assert blow.rank in accused(lines), lines
    return max(when - story.fired for when, *_ in story.results.values())


def accused(lines):
    """Whom the watchdog took to be missing or silent."""
    named = [
        found
        for line in lines
        for found in re.findall(r"ranks? ([\d, ]+) ha(?:s|ve) not entered|rank (\d+) was in", line)
    ]
    return {int(rank) for found in named for rank in re.findall(r"\d+", " ".join(found))}


def told(what, seconds):
    print(f"{what}: {len(seconds)} blows, the last survivor raised after {max(seconds):.2f} s at most")
