"""Small models and a training step that every process test can share."""

import random
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat


class Awkward(nn.Module):
    """Linear layers and the parameters that break hooks: 0-d, unused now and then, 3-d, frozen."""

    def __init__(self, width=24, depth=4, *, sometimes=False, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(depth))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.cube = nn.Parameter(torch.full((2, 3, width), 0.1, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.spare = nn.Linear(width, width, dtype=dtype)
        self.sometimes = sometimes
        self.calls = 0

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x * self.scale + self.cube.sum((0, 1))
        self.calls += 1
        if not self.sometimes or self.calls % 2:
            x = x + self.spare(x)
        return x.square().mean()


class SparseLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        rows = (x.abs().sum(1) * 100).long() % 20
        return self.head(self.table(rows)).square().mean()


class ComplexWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.full((4, 4), 0.5), torch.full((4, 4), -0.25)))
        self.real = nn.Linear(4, 4)

    def forward(self, x):
        y = self.real(x[:, :4]).to(torch.complex64) @ self.weight
        return y.abs().square().mean()


def build(model=Awkward, *, seed=0, **options):
    torch.manual_seed(seed)
    return model(**options)


def data(rank, step, dtype=torch.float32, width=24):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, width, generator=generator).to(dtype)


HOOKS = {
    "compat allreduce": compat.allreduce_hook,
    "compat fp16": compat.fp16_compress_hook,
    "compat bf16": compat.bf16_compress_hook,
    "compat noop": compat.noop_hook,
    "compat bf16(allreduce)": compat.bf16_compress_wrapper(compat.allreduce_hook),
}


def train(rank, how, *, make=build, steps=4, delays=False, dtype=torch.float32, accumulate=1, lr=0.05,
          group=None, **ddp_options):  # fmt: skip
    """Train a fresh model; the gradients of every step and the final weights."""
    ddp = DistributedDataParallel(make(), process_group=group, **ddp_options)
    attachment = None
    if how in HOOKS:
        ddp.register_comm_hook(group, HOOKS[how])
    elif how is not None:
        attachment = gl.attach(ddp, how, timeout=20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    seen = []
    jitter = random.Random(rank)
    if delays:
        for layer in ddp.module.layers:
            layer.weight.register_hook(lambda grad: time.sleep(jitter.random() * 0.004))
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate - 1):
            with ddp.no_sync():
                ddp(data(rank, 100 * step + part, dtype)).backward()
        ddp(data(rank, step, dtype)).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in ddp.parameters() if p.requires_grad])
        optimizer.step()
    if attachment is not None:
        attachment.close()
    return seen, [p.detach().clone() for p in ddp.parameters()]


def flat(tensors):
    dense = [t.to_dense() if t.is_sparse else t for t in tensors if t is not None]
    return torch.cat([(torch.view_as_real(t) if t.is_complex() else t).double().flatten() for t in dense])


def same(a, b):
    """Bit-equal gradients in every step and bit-equal weights."""
    return all(torch.equal(flat(x), flat(y)) for x, y in zip([*a[0], a[1]], [*b[0], b[1]], strict=True))


def replicas_equal(weights):
    mine = flat(weights)
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, mine)
    return all(torch.equal(other, mine) for other in everyone)
