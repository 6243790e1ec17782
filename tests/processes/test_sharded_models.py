"""Models that cannot be attached to, or not by this call: each is named, with what to do instead."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard

import gradlane as gl
from gradlane.local import run_ranks


def local_steps(model, text):
    return gl.local_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), text, every=4)


def refusals(rank):
    messages = {}
    mesh = init_device_mesh("cpu", (2,))
    fsdp2 = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(fsdp2[0], mesh=mesh)
    fully_shard(fsdp2, mesh=mesh)
    tensors = nn.Linear(8, 8)
    tensors.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    fsdp1 = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    for name, model in (("fsdp2", fsdp2), ("fsdp1", fsdp1), ("tensors", tensors)):
        for call in (gl.attach, gl.reduce_gradients, local_steps):
            if (name, call) == ("fsdp2", gl.attach):
                continue  # it takes the model
            with pytest.raises(gl.GradlaneError) as caught:
                call(model, "Mean()")
            messages[name, call.__name__] = f"{type(caught.value).__name__}: {caught.value}"
    return messages


EXPECTED = {
    ("fsdp2", "reduce_gradients"): "WrongType: this model is sharded by fully_shard .* use gradlane.attach",
    ("fsdp2", "local_steps"): "WrongType: this model is sharded by fully_shard .* full copy on each rank",
    ("fsdp1", "attach"): "WrongType: .* wrapped by FSDP .* shard it by fully_shard",
    ("fsdp1", "reduce_gradients"): "WrongType: .* wrapped by FSDP .* shard it by fully_shard",
    ("fsdp1", "local_steps"): "WrongType: .* wrapped by FSDP .* shard it by fully_shard",
    ("tensors", "attach"): "WrongType: .* made of DTensors .* device_mesh=",
    ("tensors", "reduce_gradients"): "InvalidValue: .* pass the group of the data-parallel ranks",
    ("tensors", "local_steps"): "WrongType: .* made of DTensors .* full copy on each rank",
}


def test_a_sharded_model_is_named_with_the_way_out():
    for messages in run_ranks(refusals, 2):
        assert messages.keys() == EXPECTED.keys()
        for key, pattern in EXPECTED.items():
            assert re.search(pattern, messages[key]), messages[key]
