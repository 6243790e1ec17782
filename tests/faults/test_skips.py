"""What else a training loop may do round a skipped step: accumulate, join, step in backward, keep copies."""

import itertools
import logging
import math
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.training import build, data, replicas_equal
from .test_nonfinite import SMALL, Injected

PARTS = 16


def micro_batches(rank, bad, to_none, view):
    """Windows of sixteen backwards, all with synchronisation. Which windows have changed the weights."""
    ddp = DistributedDataParallel(build(), gradient_as_bucket_view=view, **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    injected = Injected(ddp.module, rank, [(at, 1, 0, math.nan) for at in bad])
    changed = []
    with gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))", timeout=30) as attachment:
        for window in range(3):
            before = [p.detach().clone() for p in ddp.parameters()]
            optimizer.zero_grad(set_to_none=to_none)
            for part in range(PARTS):
                injected.step = window * PARTS + part
                (ddp(data(rank, part)) / PARTS).backward()
            optimizer.step()
            changed.append(not all(map(torch.equal, before, ddp.parameters())))
        return changed, replicas_equal(ddp.parameters()), attachment.metrics()["comm/skipped"]


@pytest.mark.parametrize(("world", "to_none", "view"), [(2, True, False), (3, False, False), (2, True, True)])
def test_a_bad_micro_batch_is_one_skip_in_a_row(world, to_none, view):
    at = PARTS + 2
    for changed, alike, skipped in run_ranks(micro_batches, world, [at], to_none, view):
        assert changed == [True, False, True]
        assert alike
        assert skipped == PARTS - 2


def diverged(rank, to_none, scaled, view):
    """In which of twenty bad steps it raised; with a scaler no optimizer is asked to step in a bad one."""
    ddp = DistributedDataParallel(build(), gradient_as_bucket_view=view, **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    injected = Injected(ddp.module, rank, [(step, 1, 0, math.nan) for step in range(20)])
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with gl.attach(ddp, "Mean()", timeout=30):
        for injected.step in range(20):
            loss = scaler.scale(ddp(data(rank, 0)))
            optimizer.zero_grad(set_to_none=to_none)
            try:
                loss.backward()
            except gl.NonFinite:
                return injected.step
            scaler.step(optimizer)
            scaler.update()
    return None


def all_ways(rank):
    ways = itertools.product((True, False), repeat=3)
    return {way: diverged(rank, *way) for way in ways}


def test_the_eleventh_bad_step_raises_however_gradients_are_cleared():
    for found in run_ranks(all_ways, 2, deadline=120):
        assert set(found.values()) == {10}, found


def by_hand(rank, closure):
    """The same without DDP: three windows of micro-batches, the second of them bad."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    injected = Injected(model, rank, [(PARTS + 2, 1, 0, math.nan)])
    changed = []

    def window():
        optimizer.zero_grad()
        for part in range(PARTS):
            (model(data(rank, part)) / PARTS).backward()
            own_loop = gl.reduce_gradients(model, "Mean()", timeout=30)
            injected.step += 1
        return own_loop

    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        own_loop = optimizer.step(window) if closure else window()
        if not closure:
            optimizer.step()
        changed.append(not all(map(torch.equal, before, model.parameters())))
    own_loop.close()
    return changed, own_loop.metrics()["comm/skipped"], replicas_equal(model.parameters())


@pytest.mark.parametrize("closure", [True, False])
def test_a_bad_micro_batch_without_ddp(closure):
    assert run_ranks(by_hand, 3, closure) == [([True, False, True], PARTS - 2, True)] * 3


def local_after_an_overflow(rank):
    """Whether a local step has changed the weights, when a scaler has skipped the step before it."""
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    injected = Injected(ddp.module, rank, [(0, 1, 0, math.inf)])
    scaler = torch.amp.GradScaler("cpu")
    with gl.attach(ddp, "Mean()", timeout=30):
        scaler.scale(ddp(data(rank, 0))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        injected.step = 1
        with ddp.no_sync():
            scaler.scale(ddp(data(rank, 1))).backward()
        scaler.step(optimizer)
        return not all(map(torch.equal, before, ddp.parameters()))


def test_a_local_step_after_an_overflow_is_taken():
    assert run_ranks(local_after_an_overflow, 2) == [True, True]


def joined(rank):
    """Each rank has as many batches as its number, and two; the last is bad."""
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    world = torch.distributed.get_world_size()
    last = world + 1
    injected = Injected(ddp.module, rank, [(1, 0, 0, math.nan), (last - 1, world - 1, 0, math.nan)])
    with gl.attach(ddp, "Mean()", timeout=30) as attachment:
        with ddp.join():
            for injected.step in range(rank + 2):
                optimizer.zero_grad()
                ddp(data(rank, 0)).backward()
                optimizer.step()
        return attachment.metrics()["comm/skipped"], attachment.skipped


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_have_joined_count_the_same_skips(world):
    assert run_ranks(joined, world) == [(2, True)] * world


def steps_in_a_hook(rank):
    ddp = DistributedDataParallel(build(), **SMALL)
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in parameters}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = [p.detach().clone() for p in parameters]
    attachment = gl.attach(ddp, "Mean()", timeout=30)
    with ddp.no_sync():
        ddp(data(rank, 0)).backward()  # a local step
    moved = not any(map(torch.equal, before, parameters))
    with pytest.raises(gl.WrongState, match=r"steps inside of backward.*optimizer.step\(\) after backward"):
        ddp(data(rank, 0)).backward()
    attachment.close()
    return moved


def applied_in_backward(rank, early):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, while it is imported
        from torch.distributed.optim import _apply_optimizer_in_backward
    net = build()
    ddp = DistributedDataParallel(net, **SMALL)
    parameters = [p for p in net.parameters() if p.requires_grad]
    said = "_apply_optimizer_in_backward.*optimizer.step"
    if early:
        _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
        with pytest.raises(gl.WrongState, match=said):
            gl.attach(ddp, "Mean()", timeout=30)
        return True
    with gl.attach(ddp, "Mean()", timeout=30):
        _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
        with pytest.raises(gl.WrongState, match=said):
            ddp(data(rank, 0))
    return True


def test_an_optimizer_that_steps_in_backward_is_refused():
    assert run_ranks(steps_in_a_hook, 2) == [True, True]
    assert run_ranks(applied_in_backward, 2, True) == [True, True]
    assert run_ranks(applied_in_backward, 2, False) == [True, True]


def copies(rank):
    """Master weights in fp32 that are copied by hand: what was said, and whether they are finite."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("gradlane").addHandler(handler)
    ddp = DistributedDataParallel(build(), **SMALL)
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    injected = Injected(ddp.module, rank, [(1, 1, 0, math.nan)])
    masters = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(masters, lr=0.02)
    with gl.attach(ddp, "Mean()", timeout=30):
        for injected.step in range(3):
            ddp.zero_grad()
            ddp(data(rank, 0)).backward()
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = parameter.grad.clone()
            optimizer.step()
    return [line for line in records if "attachment.skipped" in line]


def test_an_optimizer_of_copied_weights_is_warned_of():
    for said in run_ranks(copies, 2):
        assert len(said) == 1
        assert "its weights are not parameters of the model" in said[0]
