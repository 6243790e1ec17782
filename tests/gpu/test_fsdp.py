"""FSDP2 on a device: its streams and the lane's are ordered, and the weights are those of CPUs."""

import importlib

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlane as gl
from gradlane.local import run_ranks

from .ranks import build, needs_compiler, run, some_of

pytestmark = needs_compiler

MEANS, INT8 = "Mean()", "ErrorFeedback(Sharded(Int8()))"
WAYS = ((MEANS, (2,)), (MEANS, (2, 2)), (INT8, (2, 2)))


def trained(rank, strategy, shape, device):
    model = build().to(device)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    attachment = gl.attach(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(8, 64, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    own = [p.to_local().detach().cpu().flatten() for p in model.parameters()]
    races = importlib.import_module(f"{__package__}.device").races() if device == "emulated" else []
    attachment.close()
    return races, torch.cat(own).numpy()


@pytest.mark.parametrize(("strategy", "shape"), some_of(WAYS, WAYS[0]))
def test_fsdp_is_ordered_and_has_the_weights_of_cpus(strategy, shape):
    world = int(np.prod(shape))
    found = run(trained, world, strategy, shape, "emulated")
    expected = run_ranks(trained, world, strategy, shape, "cpu")
    for (races, own), (_, other) in zip(found, expected, strict=True):
        assert races == []
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-6 if strategy == MEANS else 1e-3)
