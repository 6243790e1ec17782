"""``Auto`` on a device: it tries strategies in real steps, times them by events there; replicas are equal."""

import importlib

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl

from .ranks import build, needs_compiler, run

pytestmark = needs_compiler

OFF, INT8, INT4 = "Mean()", "Sharded(Int8())", "ErrorFeedback(Sharded(Int4()))"
SECONDS = {OFF: 1.0, INT8: 0.6, INT4: 1.01}
SLOW, FAST = 200, 1  # nanoseconds of the link for a byte; a byte of memory takes one


def trained(rank, auto, steps, link=FAST, own_loop=False):
    device = importlib.import_module(f"{__package__}.device")
    importlib.import_module(f"{__package__}.group").LINK = link
    model = build().to(device.DEVICE)
    if own_loop:
        attachment = gl.attach_without_ddp(model, auto)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.03)
        attachment = gl.attach(model, auto)
    optimizer, waits = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False), []
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * rank + step)).to(device.DEVICE)
        device.log.clear()
        model(x).square().mean().backward()
        if own_loop:
            gl.reduce_gradients(model)
        optimizer.step()
        waits.append(device.log.all_waits)
        optimizer.zero_grad()
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).numpy()
    found = device.races(), weights, attachment.decisions(), waits
    attachment.close()
    return found


def by_events(rank, link, steps, own_loop):
    return trained(rank, gl.Auto(among=[INT8]), steps, link, own_loop)


@pytest.mark.parametrize("own_loop", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("link", "expected"), [(SLOW, INT8), (FAST, OFF)], ids=["slow link", "fast link"])
def test_steps_are_timed_by_the_device(link, expected, own_loop):
    """In steps of plain DDP the host waits for nothing, so its own clock would say that they take no time."""
    found = run(by_events, 2, link, 36, own_loop, deadline=120)
    for races, weights, decisions, waits in found:
        assert races == []
        assert np.array_equal(weights, found[0][1])
        assert {decision.strategy for decision in decisions} == {OFF, INT8}
        assert decisions[-1].strategy == expected, decisions[-1].why
        assert decisions == found[0][2]
        assert own_loop or waits[2:7] == [0] * 5  # DDP itself waits in the second one


def by_a_clock(rank):
    auto, now = gl.Auto(among=[INT8, INT4]), [0.0]

    def clock():
        now[0] += SECONDS[auto.course.now]
        return now[0]

    auto.use_clock(clock)
    return trained(rank, auto, 110)


@pytest.mark.slow
def test_it_tries_without_forecasts_and_adopts_what_is_faster():
    (races, weights, decisions, _), (others, theirs, also, _) = run(by_a_clock, 2, deadline=120)
    assert (races, others) == ([], [])
    assert np.array_equal(weights, theirs)
    assert decisions == also
    assert {decision.strategy for decision in decisions} == {OFF, INT8, INT4}
    assert decisions[-1].strategy == INT8
