"""Models of FSDP2 on two and four ranks, and the training that frameworks are compared with."""

from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlane as gl

from .launched import Model, batches_of, loss_of, optimizer_of, ranks

ONE, TWO = (2,), (2, 2)  # dimensions of the mesh: FSDP, and HSDP with two replicas of two shards
LOSSY = {ONE: "Sharded(Int8())", TWO: "ErrorFeedback(Sharded(Int4()))"}
CLIP = 1.0  # below the norm of most gradients here
WITH_OPTIMIZER = (
    "LocalSteps(Mean(), every=2)",
    "After(2, SharedMomentum(ErrorFeedback(Sharded(Sign()))), Mean())",
)


def world_of(shape):
    return torch.Size(shape).numel()


def shard(module, shape):
    """Each layer is a group of its own."""
    names = ("replicas", "shards") if len(shape) == 2 else ("shards",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def shards_of(module):
    """This rank's weights."""
    return torch.cat([p.detach().to_local().flatten() for p in module.parameters()])


def plain(rank, shape, strategy, *, epochs=1, accumulate=1, added=False, clip=False, without=None):
    """The losses, the weights and the bytes of plain torch FSDP2, with ``gradlane.attach`` if there is a
    strategy. Of several micro-batches each is reduced if they are ``added``, or their sum."""
    model = shard(Model(), shape)
    optimizer = optimizer_of(model)
    attachment = gl.attach(model, strategy) if strategy else None
    losses = []
    for _ in range(epochs):
        for index, batch in enumerate(batches_of(rank, world_of(shape), without=without)):
            last = (index + 1) % accumulate == 0
            model.set_requires_gradient_sync(last or added)
            loss = loss_of(model, batch)
            losses.append(loss.item())
            (loss / accumulate).backward()
            if last:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return results(losses, model, attachment)


def results(losses, model, attachment):
    """Of a run that is over."""
    if attachment is None:
        return losses, shards_of(model), 0
    attachment.close()
    return losses, shards_of(model), attachment.metrics()["comm/bytes_wire"]


@cache
def reference(shape, strategy, **options):
    return ranks(lambda rank: plain(rank, shape, strategy, **options), world=world_of(shape))


def same_training(some, others):
    """Losses and weights of every rank, bit for bit."""
    return len(some) == len(others) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(some, others, strict=True)
    )
