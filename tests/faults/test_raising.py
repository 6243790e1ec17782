"""R5: a strategy raises on one rank. All ranks hear of it in that step, and training goes on, in step."""

import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.catalogue import STRATEGIES
from ..support.training import build, data, flat, replicas_equal
from .faulty import Broken, Faulty, Point
from .harness import drawing

WORLD = 3
PHASES = {
    "encode": ("before encoding", "encoded"),
    "decode": ("answered",),
    "state update": ("at its end",),
}
STATEFUL = (
    "int4 feedback",
    "1-bit",
    "dgc",
    "ef21",
    "ef21 sharded",
    "powersgd",
    "acpsgd",
    "momentum int4 feedback",
    "weighted feedback",
    "mixed",
)
"""Those that remember something, of one kind each."""


def raise_and_go_on(rank, cases, further):
    """Per case: what was caught, whether weights stay equal and finite, how long the failed step took."""
    return [_one(rank, name, point, further) for name, point in cases]


def _one(rank, name, point, further):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    caught, seconds, equal = [], 0.0, True
    with gl.attach(ddp, Faulty(STRATEGIES[name](), point), timeout=20):
        for step in range(point.step + 1 + further):
            optimizer.zero_grad()
            start = time.monotonic()
            try:
                ddp(data(rank, step)).backward()
            except (Broken, gl.PeerFailed) as error:
                caught.append((step, type(error).__name__, str(error)))
                seconds = time.monotonic() - start
                continue
            optimizer.step()
            if step in (point.step + 1, point.step + 2):
                equal = equal and replicas_equal(ddp.parameters())
        finite = bool(flat(ddp.parameters()).isfinite().all())
        equal = equal and replicas_equal(ddp.parameters())
    return caught, equal, finite, seconds


def check(cases, further, deadline):
    outcomes = run_ranks(raise_and_go_on, WORLD, cases, further, deadline=deadline)
    for number, (name, point) in enumerate(cases):
        told = f"{name}, {point}"
        for rank in range(WORLD):
            caught, equal, finite, seconds = outcomes[rank][number]
            assert [step for step, *_ in caught] == [point.step], told  # the fault fired, once, everywhere
            ((_, kind, message),) = caught
            assert kind == ("Broken" if rank == point.rank else "PeerFailed"), told
            assert f"on purpose at {point}" in message, told
            assert rank == point.rank or f"rank {point.rank} raised Broken" in message, told
            assert seconds < 5, told
            assert finite, told
            assert equal, told
    slowest = max(seconds for outcome in outcomes for *_, seconds in outcome)
    print(f"{len(cases)} points: all ranks raised in {slowest:.2f} s at most, {further} further steps, equal")


def points(phase, count):
    chance = drawing(f"raise in {phase}")
    return [Point.drawn(chance, WORLD, moments=PHASES[phase], steps=(1, 6)) for _ in range(count)]


@pytest.mark.parametrize("phase", PHASES)
def test_every_kind_of_state_survives(phase):
    """Each in one phase; in all of them in the slow test below."""
    dealt = STATEFUL[list(PHASES).index(phase) :: len(PHASES)]
    check(list(zip(dealt, points(phase, len(dealt)), strict=True)), 5, 60)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_hundred_further_steps(phase):
    """More than ten points, with a kind of state each."""
    check(list(zip(STATEFUL, points(phase, len(STATEFUL)), strict=True)), 100, 240)
