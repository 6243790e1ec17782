"""What all ranks have alike stays alike when a step fails on one of them, and privacy is counted as spent."""

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks
from gradlane.strategies.lowrank import powersgd

from ..laws.test_undo import equal
from ..support.training import Awkward, build, data, replicas_equal
from .test_nonfinite import SMALL, Injected

FAILS = 2
STRATEGIES = {
    "watch": lambda: gl.Combined(gl.Median()),
    "ledger": lambda: gl.Private(gl.Mean(), clip=1.0, noise_multiplier=1.0),
}


@dataclass
class Fails(gl.Strategy):
    """In its third step, at the last bucket, on the last rank."""

    inner: gl.Strategy
    left: int = 1

    async def reduce(self, bucket):
        if bucket.step == FAILS and bucket.is_last and bucket.rank == bucket.world - 1 and self.left:
            self.left = 0
            raise RuntimeError("on purpose")
        return await self.inner.reduce(bucket)


def fail_once(rank, names):
    """The states before and after the failed step, and after three more, in which all ranks compare them."""
    told = {}
    for name in names:
        ddp = DistributedDataParallel(build(), **SMALL)
        states = []
        with gl.attach(ddp, Fails(STRATEGIES[name]()), timeout=30, verify_every=1) as attachment:
            for step in range(FAILS + 4):
                ddp.zero_grad()
                if step in (FAILS, FAILS + 1):
                    states.append(attachment.state_dict()["state"])
                try:
                    ddp(data(rank, step)).backward()
                except (RuntimeError, gl.PeerFailed) as error:
                    assert step == FAILS, error  # noqa: PT017
            states.append(attachment.state_dict()["state"])
        told[name] = states
    return told


@pytest.mark.parametrize("world", [2, 3])
def test_a_failed_step_leaves_shared_state_alike(world):
    ranks = run_ranks(fail_once, world, list(STRATEGIES), deadline=120)
    for told in ranks:
        before, after, _ = told["watch"]
        assert equal(after, before)
        steps = [state["inner"]["spent"]["steps"] for state in told["ledger"]]
        assert steps == [FAILS, FAILS + 1, FAILS + 4]  # it counts: something may have been sent
    for one, other in pairwise(ranks):
        assert all(equal(one[name], other[name]) for name in ("watch", "ledger"))


class Lookup(torch.nn.Module):
    """With a sparse gradient in the first bucket."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.table = torch.nn.Embedding(20, 24, sparse=True)

    def forward(self, x):
        rows = (x.abs().sum(1) * 100).long() % 20
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x + self.table(rows)).square().mean()


def compat_fails(rank, make):
    """torch's hook under its own name: the factors before and after a step that fails on rank 1, when others
    have been kept already."""
    ddp = DistributedDataParallel(build(make), **SMALL)
    state = compat.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    ddp.register_comm_hook(state, compat.powerSGD_hook)
    kept, calls = powersgd.keep_factors, []

    def keep(*given):
        calls.append(given)
        if rank == 1 and step == 4 and len(calls) == 2:
            raise RuntimeError("on purpose")
        kept(*given)

    powersgd.keep_factors = keep
    found = []
    for step in range(7):
        calls.clear()
        if step in (4, 5):
            found.append(state.q_memory_dict)
        ddp.zero_grad()
        try:
            ddp(data(rank, step)).backward()
        except (RuntimeError, gl.PeerFailed) as error:
            assert step == 4, error  # noqa: PT017
    return *found, replicas_equal([q for _, q in sorted(state.q_memory_dict.items())]), len(calls)


@pytest.mark.parametrize("make", [Awkward, Lookup])
def test_the_factors_of_torchs_hook_are_undone(make):
    for before, after, alike, buckets in run_ranks(compat_fails, 2, make):
        assert buckets > 1
        assert before
        assert equal(after, before)
        assert alike


def private_with_a_scaler(rank):
    """Overflows in two of eight steps, on two ranks: the scale, what was spent, what has moved."""
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    injected = Injected(ddp.module, rank, [(3, 0, 0, math.inf), (5, 1, 2, math.nan)])
    told = []
    strategy = gl.Private(gl.Mean(), clip=1.0, noise_multiplier=1.0)
    with gl.attach(ddp, strategy, timeout=30, scaler=scaler) as attachment:
        for injected.step in range(8):
            before = [p.detach().clone() for p in ddp.parameters()]
            optimizer.zero_grad()
            scaler.scale(ddp(data(rank, 0))).backward()
            scaler.step(optimizer)
            scaler.update()
            moved = not all(map(torch.equal, before, ddp.parameters()))
            told.append((moved, scaler.get_scale(), strategy.spent.steps))
        return told, attachment.metrics()["comm/skipped"], replicas_equal(ddp.parameters())


@pytest.mark.parametrize("world", [2, 3])
def test_an_overflow_lowers_the_scale_and_spends_no_privacy(world):
    moved = [step not in (3, 5) for step in range(8)]
    scales = [2.0 ** (10 - (step >= 3) - (step >= 5)) for step in range(8)]
    spent = [1, 2, 3, 3, 4, 4, 5, 6]
    wanted = list(zip(moved, scales, spent, strict=True)), 2, True
    assert run_ranks(private_with_a_scaler, world) == [wanted] * world
