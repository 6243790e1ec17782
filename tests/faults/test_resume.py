"""R2: a run that is saved and goes on in new processes is the run that never stopped, bit for bit."""

import random

import pytest
import torch

from gradlane.local import run_ranks

from ..checkpoints import run, stateful
from .harness import drawn_again

OPTIONS = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})


def check(seed, world, names, further, folder):
    """Save at a random step, go on from there; the weights after ``further`` steps."""
    chance = random.Random(seed)
    options = OPTIONS[seed % len(OPTIONS)]
    optimizer = chance.choice(("sgd", "adam"))
    save_at = chance.randint(2 if "static_graph" in options else 1, 12)
    print(f"seed {seed}: {world} ranks, saved at step {save_at}, {optimizer}, {options}")
    given = (names, str(folder), save_at, save_at + further)

    def trained(resume):
        def function(rank, *args):
            return run(rank, *args, optimizer=optimizer, resume=resume, seed=seed, **options)

        return run_ranks(function, world, *given, deadline=280)

    whole, resumed = trained(False), trained(True)
    assert len(whole[0]) == len(names)
    for mine, again in zip(whole, resumed, strict=True):
        assert [name for name in names if not torch.equal(mine[name], again[name])] == []
    print(f"{len(names)} strategies are bit-identical after {further} further steps")


FEW = ("1-bit", "powersgd", "ef21 sharded")
"""Two phases and a server's memory, factors, two memories: all three depend on how buckets are cut."""


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (4, 6)])
def test_goes_on_as_if_it_had_not_stopped(world, seed, tmp_path):
    check(seed, world, FEW, 10, tmp_path)


HANDS = 4
"""Strategies are dealt to so many cases: each meets each of DDP's options once, in four times four seeds."""


def dealt(seed):
    return stateful()[(seed + seed // HANDS) % HANDS :: HANDS]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 120))
def test_every_stateful_strategy_at_two_ranks(seed, tmp_path):
    seed = drawn_again(seed)
    check(seed, 2, dealt(seed), 50, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(200, 204))
def test_every_stateful_strategy_at_four_ranks(seed, tmp_path):
    seed = drawn_again(seed)
    check(seed, 4, dealt(seed), 20, tmp_path)


def test_strategies_are_dealt_to_all_options():
    met = {(name, seed % len(OPTIONS)) for seed in range(100, 120) for name in dealt(seed)}
    assert met == {(name, option) for name in stateful() for option in range(len(OPTIONS))}
    assert {name for seed in range(200, 204) for name in dealt(seed)} == set(stateful())
