"""What steps, new buckets and a checkpoint cost grows with the number of parameters, not with its square."""

import time

import pytest
import torch

import gradlane as gl
from gradlane.core.strategy import named_states
from gradlane.core.world_change import Expected

from ..support.catalogue import STRATEGIES
from ..support.grids import every

FEW, TIMES = 300, 4
ALLOWED = 9.0  # for 4 times the parameters; 4 is linear, 16 quadratic
SMALL = 600  # bytes: some ten parameters in a bucket

NAMES = (
    "mean",
    "route",
    "momentum",
    "int4 feedback",
    "1-bit",
    "dgc",
    "ef21",
    "powersgd",
    "powersgd of buckets",
    "acpsgd",
)


def gradients(count):
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (5,)] * (count // 2)
    return {f"a.{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def life(name, count):
    """CPU seconds: steps in one bucket, in many, and in one again; a state that is saved, checked and loaded,
    and a step from there; a dry run."""
    given = [gradients(count)] * 2
    simulation = gl.Simulation(STRATEGIES[name](), 2)
    slots = {name: Expected(grad.shape, grad.dtype) for name, grad in given[0].items()}
    began = time.process_time()
    for limit in (None, SMALL, None):
        simulation.bucket_bytes = limit
        simulation.step(given)
    for strategy in simulation.strategies:
        for leaf in named_states(strategy):
            state = leaf.state.state_dict()
            assert not hasattr(leaf.state, "fitting") or not leaf.state.fitting(state, slots)[1]
        strategy.load_state_dict(strategy.state_dict())
    simulation.step(given)
    gl.dry_run(STRATEGIES[name](), {name: grad.shape for name, grad in given[0].items()}, 2)
    return time.process_time() - began


@pytest.mark.parametrize("name", every(2, NAMES))
def test_a_life_is_linear_in_the_parameters(name):
    life(name, 20)  # what is done once
    found = []
    for _ in range(3):  # a machine that is busy with other things may be slow for a while
        found.append(life(name, FEW * TIMES) / life(name, FEW))
        if found[-1] < ALLOWED:
            return
    raise AssertionError(f"{TIMES} times the parameters cost {found} times as much")
