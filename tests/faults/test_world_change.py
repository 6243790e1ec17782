"""R3: a run goes on with another number of ranks, and the residual stays what it was."""

import random
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.core.strategy import named_states, shared_state
from gradlane.local import run_ranks

from ..support.catalogue import STRATEGIES, WITH_FEEDBACK
from ..support.checkpoints import residual_of, total
from .harness import drawn_again

WORLDS = (4, 2, 3)
WITH_RESIDUAL = (*WITH_FEEDBACK, "weighted feedback", "median int4 feedback", "int4 clipped feedback",
                 "momentum", "dgc", "momentum int4 feedback", "geometric median int4 feedback")  # fmt: skip
WITH_STATE = (*WITH_RESIDUAL, "ef21", "ef21 sharded", "private powersgd, no noise", "mixed", "nesterov",
              "nesterov int4 feedback", "sparseloco", "private nesterov, no noise")  # fmt: skip
BATCH = 24  # of all ranks together: the same for 4, 2 and 3


def conserved(before, after, name):
    """Sums over ranks, to 1e-6 of the largest that a rank owes. A memory of bf16 rounds every sum."""
    narrow = "bf16 memory" in name or name == "int2 feedback bf16"
    slack = len(before) * 2**-9 if narrow else 1e-6
    was, now = total(before), total(after)
    assert set(now) <= set(was)
    for key, value in was.items():
        largest = max(float(own[key].abs().max()) for own in before if key in own)
        difference = now.get(key, torch.zeros_like(value)) - value
        assert float(difference.abs().max()) <= slack * largest, (name, key)


SHAPES = {"a.weight": (70, 5), "a.bias": (7,), "scale": (), "b.weight": (3, 2, 20)}


@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.parametrize("worlds", [(4, 2, 3), (1, 5, 2)])
def test_the_sum_of_the_residual_survives(name, worlds):
    seed = random.Random(f"{name} {worlds}").randrange(2**31)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    old = None
    for world in worlds:
        ranks = gl.Simulation(STRATEGIES[name](), world=world)
        if old is not None:
            saved = [strategy.state_dict() for strategy in old.strategies]
            for rank, strategy in enumerate(ranks.strategies):
                strategy.load_state_dict(strategy.carried(saved, rank, world))
            ranks.steps = old.steps
            before = [residual_of(strategy) for strategy in old.strategies]
            conserved(before, [residual_of(strategy) for strategy in ranks.strategies], name)
        for _ in range(3):
            given = [
                {k: torch.randn(s, generator=generator) for k, s in SHAPES.items()} for _ in range(world)
            ]
            answers = ranks.step(given)
            assert all(torch.equal(answer[key], answers[0][key]) for answer in answers for key in SHAPES)
        same = [shared_state(strategy) for strategy in ranks.strategies]
        assert all(str(state) == str(same[0]) for state in same)
        old = ranks


def test_what_both_encodings_lost_arrives_when_two_ranks_go_on():
    """No gradient comes any more: all that was given before arrives in the end."""
    sharded = gl.ErrorFeedback(gl.Sharded(gl.TopK(0.5)))
    four, two = gl.Simulation(sharded, world=4), gl.Simulation(sharded, world=2)
    given = [{"w": torch.randn(64, generator=torch.Generator().manual_seed(rank))} for rank in range(4)]
    arrived = 4 * four.step(given)[0]["w"].double()
    saved = [strategy.state_dict() for strategy in four.strategies]
    for rank, strategy in enumerate(two.strategies):
        strategy.load_state_dict(strategy.carried(saved, rank, 2))
    two.steps = 1
    for _ in range(4):
        arrived += 2 * two.step([{"w": torch.zeros(64)}] * 2)[0]["w"].double()
    torch.testing.assert_close(arrived, sum(own["w"].double() for own in given), rtol=1e-6, atol=1e-6)


def test_estimates_of_ef21_begin_with_their_mean():
    old, new = (gl.Simulation(STRATEGIES["ef21 sharded"](), world=world) for world in (4, 3))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        old.step([{"w": torch.randn(200, generator=generator)} for _ in range(4)])
    saved = [strategy.state_dict() for strategy in old.strategies]
    for rank, strategy in enumerate(new.strategies):
        strategy.load_state_dict(strategy.carried(saved, rank, 3))
        assert torch.equal(strategy.own.state_dict()["w"], saved[0]["mean"]["w"])
        assert torch.equal(strategy.mean.state_dict()["w"], saved[0]["mean"]["w"])


def test_a_watch_forgets():
    states = [{"watch": {"step": 4, "seen": torch.zeros(4, 5, dtype=torch.double)}}] * 4
    assert gl.Combined(gl.Median()).carried(states, 0, 3) == {}


class Regression(nn.Module):
    """Two layers that learn from another two, and noise that nobody can learn."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(16, 48), nn.Linear(48, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@cache
def teacher():
    return Regression(99).requires_grad_(False)


def batch(seed, step, size=BATCH):
    generator = torch.Generator().manual_seed(100_000 * seed + step)
    x = torch.randn(size, 16, generator=generator)
    return x, teacher()(x) * 3 + torch.randn(size, 8, generator=generator)


def train(rank, names, folder, seed, first, last, resume, save):
    """From step to step, over the same batches whatever the number of ranks; the loss on data of its own."""
    world = torch.distributed.get_world_size()
    losses, residual = {}, {}
    for name in names:
        module = Regression(seed)
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.002)
        momentum = 0.0 if "momentum" in name or name == "dgc" else 0.5
        updates = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=momentum)
        with gl.attach(ddp, STRATEGIES[name](), timeout=60) as attachment:
            if resume:
                saved = torch.load(f"{folder}/{name}-{first}.pt", weights_only=True)
                module.load_state_dict(saved["model"])
                updates.load_state_dict(saved["optimizer"])
                attachment.load(f"{folder}/{name}")
                assert attachment.step == first
            begins = residual_of(attachment.strategy)
            for step in range(first, last):
                x, y = (part[rank::world] for part in batch(seed, step))
                updates.zero_grad()
                nn.functional.mse_loss(ddp(x), y).backward()
                updates.step()
            residual[name] = (begins, residual_of(attachment.strategy))
            if save:
                attachment.save(f"{folder}/{name}")
                if rank == 0:
                    state = {"model": module.state_dict(), "optimizer": updates.state_dict()}
                    torch.save(state, f"{folder}/{name}-{last}.pt")
        with torch.no_grad():
            x, y = batch(seed, 99_999, size=2000)
            losses[name] = float(nn.functional.mse_loss(module(x), y))
        assert list(named_states(attachment.strategy))
    return losses, residual


def changing(names, folder, seed, steps):
    """4 -> 2 -> 3 ranks: the losses at the end, and the old residual before and after each change."""
    ends, ranks = None, []
    for place, world in enumerate(WORLDS):
        first, last = place * steps, (place + 1) * steps
        ranks = run_ranks(train, world, names, folder, seed, first, last, place > 0, True, deadline=280)
        begins = {name: [residual[name][0] for _, residual in ranks] for name in names}
        if ends is not None:
            for name in names:
                conserved(ends[name], begins[name], name)
        ends = {name: [residual[name][1] for _, residual in ranks] for name in names}
        assert all(any(value.count_nonzero() for value in total(ends[name]).values()) for name in names)
    return ranks[0][0]


def test_four_two_three_in_processes(tmp_path):
    changing(("1-bit", "powersgd", "dgc"), str(tmp_path), seed=3, steps=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(3))
def test_the_loss_is_that_of_the_run_without_change(part, tmp_path):
    names, seed = WITH_RESIDUAL[part::3], drawn_again(11)
    print(f"seed {seed}")
    changed = changing(names, str(tmp_path), seed, steps=60)
    plain = run_ranks(train, 4, names, str(tmp_path), seed, 0, 180, False, False, deadline=280)[0][0]
    apart = {name: abs(changed[name] / plain[name] - 1) for name in names}
    for name in names:
        print(f"{name}: {changed[name]:.4f} with changes, {plain[name]:.4f} without")
    print(f"{len(names)} losses, {100 * max(apart.values()):.2f} % apart at most")
    assert {name: value for name, value in apart.items() if value >= 0.02} == {}
