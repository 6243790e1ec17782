"""Ranks of FSDP2 models that die or stall: in FSDP's own collectives, in a strategy, between steps."""

import signal
import time

import pytest
import torch

import gradlane as gl
from gradlane.local import tell

from ..support.fsdp import batch, sharded
from .harness import Run, Warnings, connect, drawing, leave_the_lost

STEPS = 80  # more than any fault lets happen
INT4 = "ErrorFeedback(Sharded(Int4()))"
MESHES = {
    "hsdp": ((2, 2), False, INT4),
    "replicate": ((3,), True, INT4),
    "one dimension": ((3,), False, "Sharded(Int8())"),
}


def ranks_of(name):
    shape = MESHES[name][0]
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def train_until_lost(rank, path, name, victim, step_of_fault, timeout):
    warnings = Warnings()
    shape, copies, text = MESHES[name]
    connect(rank, path, ranks_of(name))
    story = _train(rank, shape, copies, text, victim, step_of_fault, timeout)
    leave_the_lost()
    return *story, [line for _, line in warnings.lines]


def _train(rank, shape, copies, text, victim, step_of_fault, timeout):
    model = sharded(shape, copies=copies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    attachment = gl.attach(model, text, timeout=timeout)
    try:
        for step in range(STEPS):
            if rank == victim and step == step_of_fault:
                tell(("begun", step))
            optimizer.zero_grad()
            model(batch(rank, step)).backward()
            optimizer.step()
            time.sleep(0.001)
    except gl.PeerLost as error:
        return time.monotonic(), str(error), error.rank
    finally:
        attachment.close()
    raise AssertionError(f"rank {rank} has trained through {STEPS} steps")


def befall(name, what, victim, delay, timeout):
    print(name, what, victim, delay)

    def on_report(running, report):
        if report[0] == "begun":
            time.sleep(delay)
            running.signal(victim, what)

    return Run(
        train_until_lost,
        ranks_of(name),
        name,
        victim,
        3,
        timeout,
        deadline=40,
        victim=victim,
        on_report=on_report,
    ).ended()


def survivors(story, name, victim):
    assert set(story.results) == set(range(ranks_of(name))) - {victim}, story.failures
    assert all(story.codes[rank] == 0 for rank in story.results), story.codes
    return story.results.values()


def kill(name, victim, delay):
    story = befall(name, signal.SIGKILL, victim, delay, timeout=20)
    for when, message, lost, _ in survivors(story, name, victim):
        assert when - story.fired < 5, f"after {when - story.fired:.2f} s: {message}"
        assert lost == victim, message
        assert f"rank {victim}" in message


@pytest.mark.parametrize("name", MESHES)
def test_a_killed_rank_is_named_by_all_others(name):
    chance = drawing(f"kill, {name}")
    kill(name, chance.randrange(ranks_of(name)), chance.uniform(0, 0.02))


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_killed_at_twenty_points(name):
    chance = drawing(f"kill often, {name}")
    for _ in range(20):
        kill(name, chance.randrange(ranks_of(name)), chance.uniform(0, 0.05))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp", "one dimension"])
def test_a_stopped_rank_is_named_in_time(name):
    chance = drawing(f"stop, {name}")
    victim = chance.randrange(1, ranks_of(name))  # rank 0 has the store, in which the others find who is late
    story = befall(name, signal.SIGSTOP, victim, chance.uniform(0, 0.02), timeout=5)
    for when, message, lost, lines in survivors(story, name, victim):
        assert 4 < when - story.fired < 8, f"after {when - story.fired:.2f} s: {message}"
        assert lost == victim, message
        assert any(f"rank {victim}" in line for line in lines), lines
