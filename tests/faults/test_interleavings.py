"""R7: any number of buckets, any of DDP's modes, ranks that dawdle anywhere: no hang, replicas bit-equal."""

import contextlib
import random
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.core.running import intercept

from ..support.catalogue import STRATEGIES
from ..support.training import replicas_equal
from .harness import SEED, Run, connect, drawing, side_by_side

WORLD, STEPS, LAYERS, WIDTH = 3, 4, 16, 12
BUCKETS = (1, 2, 4, 16)
MODES = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "no_sync": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


class Layers(nn.Module):
    """Sixteen layers of one size; ``sometimes`` every second step leaves some of them out."""

    def __init__(self, *, sometimes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.sometimes, self.calls = sometimes, 0

    def forward(self, x):
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if not (self.sometimes and self.calls % 2 and number in (3, 7)):
                x = x + torch.tanh(layer(x))
        return x.square().mean()


@dataclass
class Dawdling(gl.Strategy):
    """The strategy inside, with pauses of this rank's own before, between and after its requests."""

    inner: gl.Strategy
    most: float

    def __post_init__(self):
        self._chance = None

    async def reduce(self, bucket):
        self._chance = self._chance or random.Random(f"{SEED} {bucket.rank}")

        async def answer(request):
            self._pause()
            return await request

        self._pause()
        reduced = await intercept(self.inner.reduce(bucket), answer)
        self._pause()
        return reduced

    def _pause(self):
        if self._chance.random() < 0.3:
            time.sleep(self._chance.random() * self.most)


def train_all(rank, path, cases):
    """Per case: how many buckets there were, and whether all replicas were equal in every step."""
    connect(rank, path, WORLD)
    outcomes = [_train(rank, *case) for case in cases]
    gl.shutdown()
    return outcomes


def _train(rank, name, buckets, mode):
    torch.manual_seed(0)
    model = Layers(sometimes=mode == "find_unused_parameters")
    cap = LAYERS // buckets * WIDTH * WIDTH * 4
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap / 2**20, **MODES[mode])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    jitter = random.Random(f"{SEED} {rank}")
    for layer in model.layers[::5]:
        layer.weight.register_hook(lambda grad: time.sleep(jitter.random() * 0.002))
    seen, equal = set(), []

    def observe(event):
        seen.add((event.step, event.bucket))

    with gl.attach(ddp, Dawdling(STRATEGIES[name](), 0.002), timeout=30, observer=observe, ranks_per_node=1):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2 if mode == "no_sync" else 1):
                inputs = torch.randn(
                    4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank)
                )
                with ddp.no_sync() if mode == "no_sync" and part == 0 else contextlib.nullcontext():
                    ddp(inputs).backward()
            optimizer.step()
            equal.append(replicas_equal(ddp.parameters()))
    last = [bucket for step, bucket in seen if step == STEPS - 1]
    return len(last), equal


def check(groups, deadline):
    """Groups of cases side by side, each in ranks of its own: they make each other dawdle, too."""
    starts = [partial(Run, train_all, WORLD, cases, deadline=deadline) for cases in groups]
    for cases, story in zip(groups, side_by_side(starts, most=4), strict=True):
        assert set(story.results) == set(range(WORLD)), story.failures
        for number, case in enumerate(cases):
            for outcomes in story.results.values():
                buckets, equal = outcomes[number]
                assert buckets == case[1], case
                assert equal == [True] * STEPS, case
    print(f"{sum(map(len, groups))} cases: no hang, replicas equal in every step")


def test_every_mode_with_every_number_of_buckets():
    chance = drawing("interleavings")
    check([[(chance.choice(list(STRATEGIES)), buckets, mode) for buckets in BUCKETS for mode in MODES]], 60)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", BUCKETS)
def test_every_strategy(buckets):
    check([[(name, buckets, mode) for name in STRATEGIES] for mode in MODES], 280)
