"""FSDP and tensor parallelism are named, with what to do instead; not taken for something else."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard

import gradlane as gl
from gradlane.local import run_ranks


def refusals(rank):
    told = {}
    mesh = init_device_mesh("cpu", (2,))
    fsdp2 = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(fsdp2[0], mesh=mesh)
    fully_shard(fsdp2, mesh=mesh)
    parallel = nn.Linear(8, 8)
    parallel.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    fsdp1 = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    for name, model in (("fsdp2", fsdp2), ("fsdp1", fsdp1), ("tensors", parallel)):
        for call in (gl.attach, gl.reduce_gradients):
            with pytest.raises(gl.WrongType) as caught:
                call(model, "Mean()")
            told[name, call.__name__] = str(caught.value)
    return told


def test_a_sharded_model_is_told_what_it_is():
    for told in run_ranks(refusals, 2):
        for (model, call), text in told.items():
            what = {"fsdp2": "sharded by fully_shard (FSDP2)", "fsdp1": "wrapped by FSDP"}.get(
                model, "made of DTensors"
            )
            assert what in text
            assert "gradlane reduces the gradients of full copies" in text
            assert ("without FSDP, wrap it in DistributedDataParallel instead" in text) == (call == "attach")
