"""Tensor parallelism beside data parallelism: copies stay bit-equal, and all ranks agree on each step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.catalogue import ClippedMean

INT4 = "ErrorFeedback(Sharded(Int4()))"


class Block(nn.Module):
    """A norm of which all ranks have copies, and two layers of which they have pieces."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


KINDS = {
    "ddp": (2, 2),
    "own loop": (2, 2),
    "replicate": (2, 2),
    "fsdp": (2, 2),
    "hsdp": (2, 2, 2),
}
NAMES = {2: ("dp", "tp"), 3: ("replicas", "shards", "tp")}


def prepared(kind):
    """The model, what the loop calls, the mesh, and this rank's place among the data-parallel ranks."""
    shape = KINDS[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = mesh[NAMES[len(shape)][:-1]]
    if kind == "ddp":
        return model, DistributedDataParallel(model, device_mesh=data), data
    if kind != "own loop":
        for part in (*model.blocks, model):
            (replicate if kind == "replicate" else fully_shard)(part, mesh=data)
    return model, model, data


def place_of(data):
    return int((data.mesh.flatten() == dist.get_rank()).nonzero())


def batch(place, step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + place))


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trained(rank, kind, text, steps, bad=None):
    """The weights that others have copies of; all weights; which steps were skipped. In step 2 a NaN is in
    the gradient of one piece, on rank ``bad`` alone."""
    torch.set_num_threads(1)
    module, model, data = prepared(kind)
    names, parameters = zip(*module.named_parameters(), strict=True)
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    group = data.get_group() if data.ndim == 1 else None
    attachment = None
    if kind == "own loop" and text:
        attachment = gl.attach_without_ddp(model, text, group=group, timeout=20)
    elif text:
        attachment = gl.attach(model, text, timeout=20)
    skipped = []
    for step in range(steps):
        optimizer.zero_grad()
        handle = None
        if rank == bad and step == 2:
            handle = parameters[names.index("blocks.0.up.weight")].register_hook(poison)
        model(batch(place_of(data), step)).backward()
        if handle is not None:
            handle.remove()
        if kind == "own loop" and text:
            gl.reduce_gradients(model)
        elif kind == "own loop":
            for parameter in parameters:
                dist.all_reduce(local(parameter.grad), op=dist.ReduceOp.AVG, group=group)
        optimizer.step()
        skipped.append(attachment is not None and attachment.skipped)
    if attachment is not None:
        attachment.close()
    weights = {name: local(p).detach().clone() for name, p in zip(names, parameters, strict=True)}
    copies = {name: w for name, w in weights.items() if "up" not in name and "down.weight" not in name}
    return copies, weights, skipped


def poison(grad):
    local(grad)[:1] = float("nan")
    return grad


EVERY = [
    "ddp",
    "fsdp",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("own loop", "replicate", "hsdp")),
]


def ranks_of(kind):
    return 8 if kind == "hsdp" else 4


@pytest.mark.parametrize("kind", EVERY)
def test_copies_stay_bit_equal_and_the_mean_is_torchs(kind):
    world = ranks_of(kind)
    native = run_ranks(trained, world, kind, None, 4)
    ours = run_ranks(trained, world, kind, "Mean()", 4)
    for (_, theirs, _), (_, mine, _) in zip(native, ours, strict=True):
        assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
    text = "Sharded(Int4())" if kind == "fsdp" else INT4
    lossy = run_ranks(trained, world, kind, text, 10, deadline=120)
    for first in range(0, world, 2):  # ranks 2k and 2k + 1 share a tensor-parallel group
        one, two = lossy[first][0], lossy[first + 1][0]
        assert one.keys() == two.keys()
        assert len(one) == 8
        assert all(torch.equal(one[name], two[name]) for name in one), kind
    changed = [not torch.equal(lossy[0][1][name], native[0][1][name]) for name in lossy[0][1]]
    assert all(changed)


@pytest.mark.parametrize("kind", ["own loop", pytest.param("ddp", marks=pytest.mark.slow)])
def test_nan_in_one_piece_is_skipped_by_all_ranks(kind):
    for _, weights, skipped in run_ranks(trained, 4, kind, INT4, 4, 1):
        assert skipped == [False, False, True, False]
        assert all(weight.isfinite().all() for weight in weights.values())


def refused(rank, kind):
    _, model, data = prepared(kind)
    if kind == "ddp":
        with pytest.raises(gl.InvalidValue, match="verify_every is not possible"):
            gl.attach(model, "Mean()", verify_every=2)
    with gl.attach(model, ClippedMean(1.0), timeout=20):
        loss = model(batch(place_of(data), 0))
        with pytest.raises((gl.InvalidValue, gl.PeerFailed), match="sum over the whole gradient"):
            loss.backward()
    return True


@pytest.mark.parametrize("kind", ["replicate", "ddp"])
def test_what_is_not_possible_is_refused(kind):
    assert run_ranks(refused, 4, kind) == [True] * 4
