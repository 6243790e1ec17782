"""Real DDP, real autograd and the real lane, on the emulated device, in a process for each rank."""

import importlib
import textwrap
from dataclasses import dataclass, field
from inspect import getsource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.lane import open as opening
from gradlane.local import run_ranks
from gradlane.teardown import shutdown

from .build import COMPILER, built, compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason=f"the emulated device needs {COMPILER}")


def run(function, world, *args, deadline=60.0):
    """``function(rank, *args)`` on ``world`` ranks with an emulated device each; their results."""
    built()  # once, not in every rank
    return run_ranks(_on_device, world, world, function, args, init=False, deadline=deadline)


def _on_device(rank, path, world, function, args):
    for module in ("device", "group"):
        importlib.import_module(f"{__package__}.{module}")  # not before the fork: it changes torch for good
    opening.STREAM_BACKENDS = (*opening.STREAM_BACKENDS, "emulated")
    dist.init_process_group("emulated", store=dist.FileStore(path, world), rank=rank, world_size=world)
    result = function(rank, *args)
    shutdown()
    return result


@dataclass
class Found:
    """What a rank has seen."""

    gradients: list = field(default_factory=list)
    """Of each step, flat."""
    weights: object = None
    races: list = field(default_factory=list)
    waits: dict = field(default_factory=dict)
    """Where the host waited in the last step, and how often."""
    all_waits: int = 0
    """The same with waits for events, in the whole lane."""
    kernels: int = 0
    """On other streams than DDP's, in the last step."""
    bytes: int = 0
    errors: list = field(default_factory=list)
    """(step, type, message) of what backward or the optimizer raised."""
    metrics: dict = field(default_factory=dict)
    steps: int = 0


class Backwards(nn.Module):
    """Its layers are used in another order than that of the parameters: so DDP rebuilds other buckets."""

    def __init__(self, width, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return self.last(x)


def some_of(cases, quick):
    """All cases; but for the quick one they belong to `make test-all`."""
    marks = [() if case == quick else pytest.mark.slow for case in cases]
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


def build(width=64):
    torch.manual_seed(0)
    return Backwards(width)


def train(rank, strategy, *, steps=4, device="emulated", cap=0.03, width=64, options=None, ddp_options=None,
          between=None, faults=None):  # fmt: skip
    """Some steps on ``build()``; ``faults(attachment, ddp, step, rank)`` runs before each, ``between(...)``
    after each. What backward raises is noted, and training goes on."""
    found, on_device = Found(), device == "emulated"
    ddp = DistributedDataParallel(build(width).to(device), bucket_cap_mb=cap, **(ddp_options or {}))
    attachment = gl.attach(ddp, strategy, **{"timeout": 20, **(options or {})})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, foreach=False)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x, y = (torch.randn(8, size, generator=generator).to(device) for size in (width, 3))
        optimizer.zero_grad()
        if faults is not None:
            faults(attachment, ddp, step, rank)
        loss = (ddp(x) - y).square().mean()
        log = importlib.import_module(f"{__package__}.device").log if on_device else None
        if log is not None:
            log.clear()
        try:
            loss.backward()
            optimizer.step()
        except (RuntimeError, ArithmeticError, ValueError) as error:
            found.errors.append((step, type(error).__name__, str(error)))
        if log is not None:
            found.waits, found.all_waits = dict(log.waits), log.all_waits
            own = [kernel for kernel in log.kernels if kernel.stream != 0]
            found.kernels, found.bytes = len(own), sum(kernel.bytes for kernel in own)
        present = [p.grad.cpu().flatten() for p in ddp.parameters() if p.grad is not None]
        found.gradients.append(torch.cat(present).numpy() if present else None)
        if between is not None:
            between(attachment, ddp, step, rank)
    found.metrics, found.steps = attachment.metrics(), attachment.step
    found.weights = torch.cat([p.detach().cpu().flatten() for p in ddp.parameters()]).numpy()
    if on_device:
        found.races = importlib.import_module(f"{__package__}.device").races()
    attachment.close()
    return found


def without(function, text, instead="pass"):
    """The function with one place of its source replaced: to show that a test notices. Its decorators are
    applied again."""
    source = textwrap.dedent(getsource(function))
    assert source.count(text) == 1, f"{text!r} is {source.count(text)} times in {function.__qualname__}"
    names = dict(function.__globals__)
    exec(compile(source.replace(text, instead), function.__code__.co_filename, "exec"), names)
    return names[function.__name__]
