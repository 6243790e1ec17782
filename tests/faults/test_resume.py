"""R2: a run that is saved and goes on in new processes is the run that never stopped, bit for bit."""

import random
from functools import partial

import pytest
import torch

import gradlane as gl

from ..support.checkpoints import run, stateful
from .harness import Run, connect, drawn_again, side_by_side

OPTIONS = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True})


class Case:
    """Saved at a random step, with one of DDP's options; ``further`` steps go on from there."""

    def __init__(self, seed, world, names, further, folder):
        chance = random.Random(seed)
        self.seed, self.world, self.names = seed, world, names
        self.options = OPTIONS[seed % len(OPTIONS)]
        self.optimizer = chance.choice(("sgd", "adam"))
        self.save_at = chance.randint(2 if "static_graph" in self.options else 1, 12)
        self.last = self.save_at + further
        self.folder = folder / str(seed)
        self.folder.mkdir()

    def __str__(self):
        how = f"saved at step {self.save_at} of {self.last}, {self.optimizer}, {self.options}"
        return f"seed {self.seed}: {self.world} ranks, {len(self.names)} strategies, {how}"


def trained(rank, path, case, resume):
    """The weights at the end, by strategy."""
    connect(rank, path, case.world)
    weights = run(
        rank, case.names, str(case.folder), case.save_at, case.last, optimizer=case.optimizer, resume=resume,
        seed=case.seed, **case.options,
    )  # fmt: skip
    gl.shutdown()
    return weights


def check(cases):
    """Two at a time: a rank waits for its peers about as long as it works."""

    def stories(resume):
        starts = [partial(Run, trained, case.world, case, resume, deadline=280) for case in cases]
        return side_by_side(starts, most=2)

    for case, whole, resumed in zip(cases, stories(False), stories(True), strict=True):
        print(case)
        for rank in range(case.world):
            assert rank in whole.results, whole.failures
            assert rank in resumed.results, resumed.failures
            mine, again = whole.results[rank], resumed.results[rank]
            assert list(mine) == list(again) == list(case.names)
            assert [name for name in case.names if not torch.equal(mine[name], again[name])] == []
    print(f"{len(cases)} of {len(cases)} cases are bit-identical")


FEW = ("1-bit", "powersgd", "ef21 sharded")
"""Two phases and a server's memory, factors, two memories: all three depend on how buckets are cut."""


def test_goes_on_as_if_it_had_not_stopped(tmp_path):
    check([Case(1, 2, FEW, 10, tmp_path), Case(6, 3, FEW, 10, tmp_path)])


HANDS = 4
"""Strategies are dealt to so many cases: each meets each of DDP's options once, in four times four seeds."""


def dealt(seed):
    return stateful()[(seed + seed // HANDS) % HANDS :: HANDS]


def drawn(seeds, world, further, folder):
    seeds = [drawn_again(seed) for seed in seeds]
    return [Case(seed, world, dealt(seed), further, folder) for seed in seeds]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(100, 120, HANDS))
def test_every_stateful_strategy_at_two_ranks(first, tmp_path):
    check(drawn(range(first, first + HANDS), 2, 50, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stateful_strategy_at_four_ranks(tmp_path):
    check(drawn(range(200, 200 + HANDS), 4, 20, tmp_path))


def test_strategies_are_dealt_to_all_options():
    met = {(name, seed % len(OPTIONS)) for seed in range(100, 120) for name in dealt(seed)}
    assert met == {(name, option) for name in stateful() for option in range(len(OPTIONS))}
    assert {name for seed in range(200, 200 + HANDS) for name in dealt(seed)} == set(stateful())
