"""Models of FSDP2 on small meshes, with the shapes that break sharding."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlane as gl

WIDTH = 24


class Odd(nn.Module):
    """First dimensions of 1, 3, 5 and 7, so that shards are padded, and some empty; a parameter that is
    frozen, and one that may be used in every second step only."""

    def __init__(self, sometimes=False):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 7), nn.Linear(7, 5), nn.Linear(5, 3, bias=False)])
        self.head = nn.Linear(3, 1)
        self.spare = nn.Parameter(torch.full((3, 2), 0.5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.sometimes = sometimes
        self.calls = 0

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        self.calls += 1
        if not self.sometimes or self.calls % 2:
            x = x + self.spare.sum(1)
        return self.head(x).square().mean()


def mesh_of(shape):
    names = ("replicas", "shards") if len(shape) == 2 else ("ranks",)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(shape, *, copies=False, blocks=True, model=None, seed=0, **options):
    """A model on a mesh: HSDP on two dimensions; ``fully_shard`` on one, or ``replicate`` if there are
    ``copies``."""
    torch.manual_seed(seed)
    model = Odd() if model is None else model()
    mesh, shard = mesh_of(shape), replicate if copies else fully_shard
    for block in model.blocks if blocks else ():
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def batch(rank, step, size=6):
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def shards(model):
    """This rank's part of the weights."""
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def replicas_equal(model, shape, copies=False):
    """Whether all ranks with the same shard have the same weights, bit for bit."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shards(model))
    step = shape[-1] if len(shape) == 2 else 1 if copies else dist.get_world_size()
    mine = everyone[dist.get_rank()]
    others = everyone[dist.get_rank() % step :: step]
    return all(torch.equal(a, b) for other in others for a, b in zip(mine, other, strict=True))


@dataclass
class RaisesOn(gl.Strategy):
    """Raises on one rank of the job, in one step and bucket."""

    inner: gl.Strategy
    rank: int
    step: int
    bucket: int = 0

    async def reduce(self, bucket):
        if (dist.get_rank(), bucket.step, bucket.index) == (self.rank, self.step, self.bucket):
            raise ZeroDivisionError("on purpose")
        return await self.inner.reduce(bucket)


def residual_sums(everyone):
    """The sum over replicas of each parameter's residual, joined from its shards and without padding."""
    found = {}
    for name, parameter in Odd().named_parameters():
        by_place = {}
        for state in everyone:
            for key, value in state.items():
                if key == name or key.startswith(name + "["):
                    place = 0 if key == name else int(key[len(name) + 1 :].split("/")[0])
                    by_place.setdefault(place, []).append(value.double())
        if by_place:
            rows = torch.cat([torch.stack(by_place[place]).sum(0) for place in sorted(by_place)])
            found[name] = rows[: parameter.shape[0]]
    return found
