"""R11: four small backwards, three of them in no_sync, are one of four times the samples."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.catalogue import STRATEGIES
from .test_extremes import numbers

PARTS, SAMPLES, STEPS = 4, 4, 3
CLOSE = 1e-6
ALONE = ("node first",)  # needs nodes


class Exact(nn.Module):
    """Its gradients are sums of small dyadic numbers: however they are added up, the bits are the same, so
    that a codec cannot round two sums of the same numbers differently."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randint(-4, 5, (16, 12), generator=generator) / 4)
        self.b = nn.Parameter(torch.randint(-4, 5, (12,), generator=generator) / 4)

    def forward(self, x):
        return (x @ self.a * self.b).sum(1).mean()


def samples(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-8, 9, (PARTS * SAMPLES, 16), generator=generator) / 8


def steps_of(rank, name, parts):
    """Gradients of all steps, then what the strategy remembers."""
    ddp = DistributedDataParallel(Exact())
    seen = []
    with gl.attach(ddp, STRATEGIES[name](), timeout=20) as attachment:
        for step in range(STEPS):
            ddp.zero_grad()
            for number, part in enumerate(samples(rank, step).chunk(parts)):
                with ddp.no_sync() if number < parts - 1 else contextlib.nullcontext():
                    (ddp(part) / parts).backward()
            seen += [p.grad.clone() for p in ddp.parameters()]
        assert attachment.step == STEPS
        return seen, list(numbers(attachment.state_dict()["state"]))


def both_ways(rank, names):
    found = {}
    for name in names:
        (whole, memory), (parts, kept) = (steps_of(rank, name, count) for count in (1, PARTS))
        found[name] = [_apart(whole, parts), _apart(memory, kept)]
    return found


def _apart(these, those):
    return max(
        (
            float((a.double() - b.double()).abs().max())
            for a, b in zip(these, those, strict=True)
            if a.numel()
        ),
        default=0.0,
    )


def check(names):
    outcomes = run_ranks(both_ways, 2, names, deadline=120)
    apart = max(value for outcome in outcomes for found in outcome.values() for value in found)
    print(f"{len(names)} strategies: gradients and memory are {apart:g} apart at most")
    for outcome in outcomes:
        for name, (gradients, memory) in outcome.items():
            assert gradients < CLOSE, name
            assert memory < CLOSE, name


def test_accumulation_is_one_large_batch():
    check([name for name in list(STRATEGIES)[::3] if name not in ALONE])


@pytest.mark.slow
def test_accumulation_is_one_large_batch_for_all():
    check([name for name in STRATEGIES if name not in ALONE])
