"""Loss scaling (R10): memory is in the units of the loss, whatever the scale does."""

import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..laws.test_undo import equal
from ..support.training import build, data, replicas_equal
from .test_nonfinite import SMALL, STRATEGIES, Injected


class Steps:
    """A scale that goes from 2^16 to 2^8 and to 2^20, as R10 has it."""

    def get_scale(self):
        return (2.0**16, 2.0**8, 2.0**20)[self.step // 10]


def train(rank, strategy, scaled):
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = Steps()
    with gl.attach(ddp, strategy, timeout=30, scaler=scaler if scaled else None) as attachment:
        for step in range(30):
            scaler.step = step
            scale = scaler.get_scale() if scaled else 1.0
            optimizer.zero_grad()
            (ddp(data(rank, step)) * scale).backward()
            for p in ddp.parameters():
                if p.grad is not None:
                    p.grad.mul_(1 / scale)
            optimizer.step()
        return [p.detach().clone() for p in ddp.parameters()], attachment.state_dict()["state"]


def with_and_without_a_scale(rank, strategies):
    return [(train(rank, strategy, False), train(rank, strategy, True)) for strategy in strategies]


def test_scaled_is_bit_identical_to_unscaled():
    strategies = [text for text in STRATEGIES if "float16" not in text]
    for found in run_ranks(with_and_without_a_scale, 2, strategies, deadline=120):
        for strategy, (plain, scaled) in zip(strategies, found, strict=True):
            assert all(map(torch.equal, plain[0], scaled[0])), strategy
            assert equal(plain[1], scaled[1]), strategy


def with_torchs_scaler(rank, given):
    """torch's own, with an overflow in step 4: it must see it, back off, and leave weights alone."""
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    injected = Injected(ddp.module, rank, [(4, 1, 2, math.inf)])
    scales, kept = [], []
    strategy = "ErrorFeedback(Sharded(Int4(block=32)))"
    with gl.attach(ddp, strategy, timeout=30, scaler=scaler if given else None) as attachment:
        for step in range(9):
            injected.step = step
            weights = [p.detach().clone() for p in ddp.parameters()]
            before = attachment.state_dict()["state"]
            optimizer.zero_grad()
            scaler.scale(ddp(data(rank, step))).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            same = all(map(torch.equal, weights, ddp.parameters()))
            kept.append(same and step > 0 and equal(attachment.state_dict()["state"], before))
        return scales, kept, replicas_equal(ddp.parameters()), attachment.metrics()["comm/skipped"]


@pytest.mark.parametrize("given", [True, False])
def test_torchs_scaler_sees_the_overflow(given):
    for scales, kept, equal_, skipped in run_ranks(with_torchs_scaler, 2, given):
        up = 2.0**11
        assert scales[:5] == [2.0**10, 2.0**10, up, up, up / 2]
        assert kept == [step == 4 for step in range(9)]
        assert equal_
        assert skipped == 1


def wrong_scaler(rank):
    ddp = DistributedDataParallel(build())
    with pytest.raises(gl.WrongType, match=r"has no get_scale\(\); pass the torch.amp.GradScaler"):
        gl.attach(ddp, "Mean()", scaler=1024.0)
    with gl.attach(ddp, "Mean()", timeout=20) as attachment:
        assert attachment.scaler is None
        attachment.scaler = scaler = torch.amp.GradScaler("cpu")
        assert attachment.scaler is scaler
    return True


def test_a_scaler_has_a_scale():
    assert run_ranks(wrong_scaler, 2) == [True, True]


class Tiny(torch.nn.Module):
    """Weights in fp16 whose gradient, 2^-26, is there in fp16 only while the loss is scaled."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16, 8, dtype=torch.float16))

    def forward(self, scale):
        return (self.weight.float() * scale * 2.0**-26).sum()


def in_fp16(rank, strategies):
    """The largest and the smallest of the gradients of two steps, without the scale."""
    scaler, found = Steps(), {}
    for strategy in strategies:
        ddp = DistributedDataParallel(Tiny())
        grads = []
        with gl.attach(ddp, strategy, timeout=30, scaler=scaler):
            for scaler.step in (0, 25):
                ddp.zero_grad()
                ddp(scaler.get_scale()).backward()
                grads.append(ddp.module.weight.grad.double() / scaler.get_scale() * 2**26)
        assert ddp.module.weight.grad.dtype == torch.float16
        found[strategy] = [float(end) for grad in grads for end in grad.aminmax()]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_of_fp16_do_not_vanish_where_they_are_unscaled(world):
    strategies = ["ErrorFeedback(Sharded(Int8()))", "EF21(Sharded(Int8()))",
                  "ErrorFeedback(PowerSGD(1, min_compression_rate=1))"]  # fmt: skip
    for found in run_ranks(in_fp16, world, strategies):
        for strategy, ends in found.items():
            assert ends == pytest.approx([1.0] * 4, rel=0.01), strategy
