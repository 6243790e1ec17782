"""Models and settings that are special on a device: what works, and what is refused when it is attached."""

import importlib

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gradlane as gl
from gradlane.core.streams import refuse_capture
from gradlane.kernels.native import native_for
from gradlane.lane import stream
from gradlane.local import run_ranks
from gradlane.session.on_devices import refuse_several_devices

from .order_points import remove
from .ranks import needs_compiler, run, some_of, train
from .test_order import ORDER


def small_buckets(rank, strategy):
    """The last bucket has fewer elements than there are ranks."""
    return train(rank, strategy, cap=0.0001, width=8)


EMPTY = ("ErrorFeedback(Sharded(Int8()))", "Combined(Median())", "Sharded(TopK(0.1))")


@needs_compiler
@pytest.mark.parametrize("strategy", some_of(EMPTY, EMPTY[0]))
def test_a_shard_may_be_empty(strategy):
    found = run(small_buckets, 4, strategy)
    for own in found:
        assert (own.races, own.errors) == ([], [])
        assert np.array_equal(own.weights, found[0].weights)


def in_autocast(rank):
    seen = []

    @gl.strategy_from
    async def looks(bucket):
        seen.append(torch.is_autocast_enabled("emulated"))
        return await gl.all_reduce(bucket.flat)

    device = importlib.import_module(f"{__package__}.device").DEVICE
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).to(device))
    with gl.attach(ddp, looks), torch.autocast("emulated", dtype=torch.bfloat16):
        ddp(torch.ones(2, 4, device=device)).square().mean().backward()
    return seen


@needs_compiler
def test_strategies_compute_outside_of_autocast():
    assert run(in_autocast, 1) == [[False]]


def sparse(rank):
    device = importlib.import_module(f"{__package__}.device").DEVICE
    ddp = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True).to(device))
    with pytest.raises(gl.InvalidValue, match="NCCL and XCCL reduce dense tensors"):
        gl.attach(ddp, "Mean()")
    return True


@needs_compiler
def test_sparse_gradients_are_refused():
    assert run(sparse, 2) == [True, True]


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(gl.InvalidValue, match="the parameters are on cpu, meta, and a rank works on one"):
        refuse_several_devices(model)
    refuse_several_devices(model[0])


def test_a_capture_is_refused(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_capture(device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_capture(torch.device("cpu"))
    with pytest.raises(gl.WrongState, match=r"cannot be part of a CUDA graph.*under no_sync"):
        refuse_capture(device)


def captured(rank):
    """The lane asks before it enqueues anything."""
    asked = []
    stream.refuse_capture = asked.append
    train(rank, "Mean()", steps=1)
    return {device.type for device in asked}


@needs_compiler
def test_the_lane_asks_whether_its_stream_is_captured():
    assert run(captured, 1) == [{"emulated"}]


def python_reducer(rank):
    import torch._dynamo  # takes a second

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(gl.InvalidValue, match="set it to 'ddp_optimizer', its default, before"):
        gl.attach(ddp, "Mean()")
    gl.attach(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "Mean()").close()
    return True


@pytest.mark.slow
def test_a_reducer_without_buckets_is_refused():
    assert run_ranks(python_reducer, 2) == [True, True]


def asked_on_another_stream(rank, without_order):
    """As a logger's thread may do, between backward and the optimizer."""
    device = importlib.import_module(f"{__package__}.device")
    if without_order:
        remove(ORDER)

    ddp, metrics = nn.parallel.DistributedDataParallel(nn.Linear(64, 3).to(device.DEVICE)), {}
    with gl.attach(ddp, "Cast(Mean(), float16)") as attachment:
        for _ in range(2):
            ddp(torch.ones(8, 64, device=device.DEVICE)).square().mean().backward()
            with torch.Stream(device.DEVICE):
                metrics = attachment.metrics()
    return device.races(), metrics


@needs_compiler
@pytest.mark.parametrize("without_order", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_metrics_may_be_asked_for_on_any_stream(without_order):
    for races, metrics in run(asked_on_another_stream, 2, without_order):
        assert bool(races) == without_order
        assert metrics["comm/overflow"] == 0


def test_compiled_kernels_do_not_take_fake_tensors():
    with FakeTensorMode():
        assert native_for(torch.empty(3)) is None
