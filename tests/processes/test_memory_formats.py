"""Parameters in channels_last, or transposed, under DDP: strategies see their elements in their order.

The gradients are given, so that no convolution of another format changes a bit.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks

from ..support.catalogue import STRATEGIES

SHAPES = {"bias": (7,), "conv": (6, 4, 3, 3), "linear": (12, 10), "scale": (), "cube": (3, 5, 4)}


def channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last)


def transposed(tensor):
    """The same elements, the first dimension running fastest."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


FORMATS = {
    "contiguous": {},
    "other": {"conv": channels_last, "linear": transposed, "cube": transposed, "turn": transposed},
}


class Given(nn.Module):
    """Its gradients are those that it is called with."""

    def __init__(self, form, complex_too=False):
        super().__init__()
        chance = torch.Generator().manual_seed(3)
        shapes = SHAPES | ({"turn": (4, 3)} if complex_too else {})
        for name, shape in shapes.items():
            kind = torch.complex64 if name == "turn" else torch.float32
            value = FORMATS[form].get(name, torch.clone)(torch.randn(shape, dtype=kind, generator=chance))
            setattr(self, name, nn.Parameter(value))
            assert getattr(self, name).stride() == value.stride()

    def forward(self, wanted):
        return sum((getattr(self, name) * g.conj()).sum().real for name, g in wanted.items())


def rank_one(shape, seed):
    chance = torch.Generator().manual_seed(seed)
    if len(shape) < 2:
        return torch.randn(shape, generator=chance)
    rows = torch.randn(shape[0], 1, generator=chance)
    return (rows @ torch.randn(1, torch.Size(shape[1:]).numel(), generator=chance)).view(shape)


def wanted(step, rank, low_rank=False, complex_too=False):
    """On all ranks; of rank one, a multiple of the same matrices."""
    if low_rank:
        return {name: rank_one(shape, step) * (1 + rank) for name, shape in SHAPES.items()}
    chance = torch.Generator().manual_seed(100 * step + rank)
    found = {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}
    if complex_too:
        found["turn"] = torch.randn(4, 3, dtype=torch.complex64, generator=chance)
    return found


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@dataclass
class RowByRow(gl.Strategy):
    """Each row times its number; looks at named gradients only."""

    async def reduce(self, bucket):
        mean = await gl.all_reduce(bucket.flat)
        for view in bucket.with_flat(mean).named().values():
            if view.dim():
                view.mul_(torch.arange(len(view)).view(-1, *[1] * (view.dim() - 1)))
        return gl.Reduced(mean)


@dataclass
class AsMatrix(gl.Strategy):
    """As one would write it by hand: a slice of the flat gradient in the shape that the layout tells."""

    async def reduce(self, bucket):
        mean, start = await gl.all_reduce(bucket.flat), 0
        for slot in bucket.layout:
            if len(slot.shape) > 1:
                mean[start : start + slot.numel].view(slot.shape)[1:].zero_()
            start += slot.numel
        return gl.Reduced(mean)


def of_low_rank(rank, world, options):
    told = {}
    module = Given("other")
    ddp = DistributedDataParallel(module, **options)
    attachment = gl.attach(ddp, gl.PowerSGD(1, min_compression_rate=0), verify_every=1)
    for step, strategy in enumerate(
        (None, None, gl.AcpSGD(1, min_compression_rate=0), RowByRow(), AsMatrix())
    ):
        if strategy is not None:
            attachment.swap(strategy)
        for _ in range(2 if isinstance(strategy, gl.AcpSGD) else 1):
            ddp.zero_grad()
            ddp(wanted(step, rank, low_rank=True)).backward()
        assert all(p.grad.stride() == p.stride() for p in module.parameters())
        told[step] = gradients(module)
    attachment.close()
    ddp = DistributedDataParallel(Given("other"), **options)
    state = compat.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0)
    ddp.register_comm_hook(state, compat.powerSGD_hook)
    for step in range(5, 9):
        ddp.zero_grad()
        ddp(wanted(step, rank, low_rank=True)).backward()
        told[step] = gradients(ddp.module)
    alone = Given("other")
    alone(wanted(9, rank, low_rank=True)).backward()
    gl.reduce_gradients(alone, gl.PowerSGD(1, min_compression_rate=0))
    told[9] = gradients(alone)
    return told


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_strategies_see_matrices_and_rows(world, options):
    """A gradient of rank one comes through PowerSGD(1) whole, in every format."""
    for told in run_ranks(of_low_rank, world, world, options):
        for step, found in told.items():
            expected = {name: g * (1 + world) / 2 for name, g in wanted(step, 0, low_rank=True).items()}
            for name, grad in expected.items():
                if step == 3 and grad.dim():
                    grad.mul_(torch.arange(len(grad)).view(-1, *[1] * (grad.dim() - 1)))
                if step == 4 and grad.dim() > 1:
                    grad[1:] = 0
                torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4, msg=f"{step} {name}")


RESUMED = ("int4 feedback", "1-bit", "powersgd", "acpsgd", "dgc", "top-k sharded", "momentum", "route")


def trained(rank, names, form, folder, first, last):
    weights = {}
    for name in names:
        module = Given(form, complex_too=True)
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with gl.attach(ddp, STRATEGIES[name]()) as attachment:
            if first:
                module.load_state_dict(torch.load(f"{folder}/{name}.pt", weights_only=True))
                attachment.load(f"{folder}/{name}")
            for step in range(first, last):
                optimizer.zero_grad()
                ddp(wanted(step, rank, complex_too=True)).backward()
                optimizer.step()
            if not first:
                attachment.save(f"{folder}/{name}")
                if rank == 0:
                    torch.save(module.state_dict(), f"{folder}/{name}.pt")
            weights[name] = {k: v.detach().clone() for k, v in module.named_parameters()}
    return weights


@pytest.mark.parametrize(
    ("world", "names"),
    [(3, RESUMED[::3]), *(pytest.param(world, RESUMED, marks=pytest.mark.slow) for world in (2, 3))],
)
def test_a_run_goes_on_in_the_other_format(tmp_path, world, names):
    """Bit for bit: the residual, and every factor, belongs to the same elements."""
    whole = {}
    for form in FORMATS:
        (tmp_path / form).mkdir()
        run_ranks(trained, world, names, form, str(tmp_path / form), 0, 3)
        whole[form] = run_ranks(trained, world, names, form, str(tmp_path / form), 3, 6)
    for form, other in (("contiguous", "other"), ("other", "contiguous")):
        told = run_ranks(trained, world, names, other, str(tmp_path / form), 3, 6)
        for name in names:
            for weights in (told, whole[other]):
                for parameter, value in whole[form][0][name].items():
                    assert torch.equal(weights[0][name][parameter], value), (form, name, parameter)
