"""Two ranks that a framework takes for those of torchrun, and the training it is compared with."""

import os
import re
import warnings
from functools import cache, partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import gradlane as gl
from gradlane.local import run_ranks

from ..support.checkpoints import total

MEMORY = "ErrorFeedback(Gathered(TopK(0.2)))"  # every rank has a memory of its own
WORLD = 2
BATCH = 4
STEPS = 8  # of an epoch, on each rank
BAD = 3  # the step in which the batch of the last rank is not finite, where one is
RATE = 0.05
HALF = {"autocast": torch.float16, "scaled": True}  # options of ``reference``
FILES = ["manifest.json", "rank-00000-of-00002", "rank-00001-of-00002"]


def ranks(function, *args, world=WORLD, deadline=90.0):
    """``function(rank, *args)`` on so many ranks; the process group is there, and a framework uses it."""
    return run_ranks(function, world, *args, deadline=deadline, prepare=partial(_as_under_torchrun, world))


def alone(function, *args, deadline=90.0):
    """``function(*args)`` in one process, as ``python train.py`` starts it: nobody tells of ranks."""
    prepare = partial(warnings.simplefilter, "ignore")
    (found,) = run_ranks(
        lambda rank, store: function(*args), 1, init=False, deadline=deadline, prepare=lambda rank: prepare()
    )
    return found


def _as_under_torchrun(world, rank):
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "tests"}  # fmt: skip
    os.environ.update({name: str(value) for name, value in told.items()})
    warnings.simplefilter("ignore")  # frameworks warn of many things that are no concern of ours


class Model(nn.Module):
    """Parameters have the names that they have in a module of Lightning's: ties are broken by name."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, inputs):
        return self.network(inputs)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))


def samples(world=WORLD, *, bad=False):
    inputs = torch.randn(world * BATCH * STEPS, 12, generator=torch.Generator().manual_seed(1))
    wanted = inputs[:, :3].sum(1, keepdim=True)
    if bad:
        inputs[BATCH * (world * BAD + world - 1)] = torch.nan
    return TensorDataset(inputs, wanted)


def all_batches(world=WORLD, *, bad=False):
    """For frameworks that give every rank its share: each takes every ``world``-th batch."""
    return DataLoader(samples(world, bad=bad), batch_size=BATCH)


def batches_of(rank, world=WORLD, *, bad=False, without=None):
    """The share of a rank; without the batch of one step, if you say so."""
    steps = [step for step in range(STEPS) if step != without]
    mine = [BATCH * (world * step + rank) + item for step in steps for item in range(BATCH)]
    return DataLoader(Subset(samples(world, bad=bad), mine), batch_size=BATCH)


def loss_of(model, batch):
    inputs, wanted = batch
    return (model(inputs) - wanted).square().mean()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def files_in(folder):
    """The names in a checkpoint of ``Attachment.save``, each without the token that is new in every save."""
    return sorted(re.sub(r"-\w+\.safetensors$", "", path.name) for path in folder.iterdir())


def scaler_of(scaled):
    """A scale that grows within an epoch: memory in units of an old one would be wrong."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)


def plain(rank, strategy, *, epochs=1, accumulate=1, autocast=None, scaled=False, world=WORLD, without=None):
    """The losses, the weights and the bytes of plain torch DDP with ``gradlane.attach``."""
    model = DistributedDataParallel(Model())
    scaler = scaler_of(scaled)
    attachment = gl.attach(model, strategy, scaler=scaler)
    optimizer = optimizer_of(model)
    losses = []
    for _ in range(epochs):
        for index, batch in enumerate(batches_of(rank, world, without=without)):
            model.require_backward_grad_sync = (index + 1) % accumulate == 0
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = loss_of(model, batch)
            losses.append(loss.item())
            scaler.scale(loss / accumulate).backward()
            if model.require_backward_grad_sync:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    attachment.close()
    return losses, weights_of(model.module), attachment.metrics()["comm/bytes_wire"]


@cache
def reference(**options):
    """Of all ranks; the same for all that are compared with it."""
    return ranks(lambda rank: plain(rank, MEMORY, **options), world=options.get("world", WORLD))


def weights_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def assert_carried(before, after):
    """What all ranks together residual is what all ranks together, however many, owe."""
    residual, carried = total(before), total(after)
    assert residual.keys() == carried.keys()
    assert any(sum_over_ranks.any() for sum_over_ranks in residual.values())
    for name, sum_over_ranks in residual.items():
        torch.testing.assert_close(carried[name], sum_over_ranks)


def equal(some, others):
    """Losses, weights and bytes of every rank, bit for bit."""
    return len(some) == len(others) and all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and a[2] == b[2] for a, b in zip(some, others, strict=True)
    )
