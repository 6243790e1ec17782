"""Loops without DDP and local steps on a device: no race, equal replicas, and one wait a step."""

import importlib

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl

from .ranks import build, needs_compiler, run, some_of
from .test_failures import Breaks

pytestmark = needs_compiler

WAYS = ("own loop", "missing gradient", "NaN", "local steps", "streaming", "warm-up", "1-bit Adam")
INT8 = "ErrorFeedback(Sharded(Int8()))"


def attached(way, model, optimizer):
    if way == "local steps":
        return model, gl.local_steps(model, optimizer, "ErrorFeedback(Sharded(Int4()))", every=2)
    if way == "streaming":
        return model, gl.local_steps(model, optimizer, "Nesterov(Mean())", every=4, fragments=2, delay=1)
    if way == "warm-up":
        ddp = DistributedDataParallel(model)
        return ddp, gl.local_steps(ddp, optimizer, "Mean()", every=2, warmup=2)
    if way == "1-bit Adam":
        ddp = DistributedDataParallel(model)
        attachment = gl.attach(ddp, "Mean()")
        gl.freeze_moments(optimizer, attachment, after=2)
        return ddp, attachment
    return model, gl.attach_without_ddp(model, INT8, bucket_mb=0.02)


def trained(rank, way):
    device = importlib.import_module(f"{__package__}.device")
    model = build().to(device.DEVICE)
    kind = torch.optim.Adam if way == "1-bit Adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01, foreach=False)
    model, attachment = attached(way, model, optimizer)
    own_loop = way in WAYS[:3]
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(8, 64, generator=generator).to(device.DEVICE)).square().mean().backward()
        if rank == 1 and step == 2 and way == "missing gradient":
            model.last.bias.grad = None
        if rank == 1 and step == 2 and way == "NaN":
            model.last.bias.grad.fill_(float("nan"))
        device.log.clear()
        if own_loop:
            gl.reduce_gradients(model)
        waits = device.log.all_waits
        optimizer.step()
        optimizer.zero_grad()
    attachment.finish()
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).numpy()
    skipped = attachment.metrics()["comm/skipped"]
    attachment.close()
    return device.races(), weights, waits if own_loop else 1, skipped


def with_a_failed_step(rank):
    """What the lane still sends of a failed step comes before the gradients of the next one."""
    device = importlib.import_module(f"{__package__}.device")
    model, errors = build().to(device.DEVICE), []
    attachment = gl.attach_without_ddp(model, Breaks(False, 1), bucket_mb=0.02)
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(8, 64, generator=generator).to(device.DEVICE)).square().mean().backward()
        try:
            gl.reduce_gradients(model)
        except (ArithmeticError, gl.PeerFailed) as error:
            errors.append((step, type(error).__name__))
            model.zero_grad()
    gradients = torch.cat([p.grad.cpu().flatten() for p in model.parameters()]).numpy()
    attachment.close()
    return device.races(), errors, gradients


def test_a_loop_goes_on_after_a_failed_step():
    for rank, (races, errors, gradients) in enumerate(found := run(with_a_failed_step, 2)):
        assert races == []
        assert errors == [(1, "PeerFailed" if rank == 0 else "ArithmeticError")]
        assert np.array_equal(gradients, found[0][2])


@pytest.mark.parametrize("way", some_of(WAYS, "own loop"))
def test_every_loop(way):
    for races, weights, waits, skipped in (found := run(trained, 2, way)):
        assert (races, waits, skipped) == ([], 1, way == "NaN")
        assert np.isfinite(weights).all()
        assert np.array_equal(weights, found[0][1])
