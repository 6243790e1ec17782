"""Every place that orders streams is needed: where one of them is missing, something is found."""

import importlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlane as gl
from gradlane import compat
from gradlane.lane.outside_steps import perform_now

from . import test_auto
from .order_points import Point, order_points, remove
from .ranks import build, needs_compiler, run, train
from .test_failures import not_finite
from .test_streams import INT8, resumed


def races():
    return importlib.import_module(f"{__package__}.device").races()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 64, generator=generator).to("emulated")


# What runs without one of the places; each returns whether anything is found.


def mean(rank):
    return bool(train(rank, "Mean()").races)


def gathered(rank):
    return bool(train(rank, "Gathered(Int8())").races)


def sharded(rank):
    return bool(train(rank, "Sharded(Int8())").races)


def compared(rank):
    found = train(rank, "Mean()", options={"verify_every": 1})
    return bool(found.races or found.errors)


def resumed_run(rank):
    return bool(resumed(rank, INT8).races)


def resumed_copies(rank):
    return bool(resumed(rank, "of a copy").races)


def nan_skips(rank):
    return not_finite(rank, "Mean()", {}).metrics["comm/skipped"] != 1


def observed(rank):
    return bool(train(rank, "Mean()", options={"observer": gl.Sink()}).errors)


def tuned(rank):
    try:
        test_auto.by_events(rank, test_auto.FAST, 20, False)
    except (RuntimeError, ValueError):  # of torch: an event that was not recorded, or is not over
        return True
    return bool(races())


def outside(rank):
    def asks(attachment, ddp, step, rank):
        lane, scopes = attachment._step.lane, attachment._scopes
        perform_now(lane, scopes, gl.Mean(), torch.ones(4, device="emulated"), step) + 1

    return bool(train(rank, "Mean()", faults=asks).races)


def own_loop(rank, missing=False):
    model = build().to("emulated")
    attachment = gl.attach_without_ddp(model, "Mean()", bucket_mb=0.02)
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        if missing and rank == 1:
            model.last.bias.grad = None
        gl.reduce_gradients(model)
    attachment.close()
    return bool(races())


def own_loop_without_a_gradient(rank):
    return own_loop(rank, missing=True)


def rounds(rank):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to("emulated")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    local = gl.local_steps(model, optimizer, "Mean()", every=2)
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local.close()
    return bool(races())


def averaged(rank):
    model = build().to("emulated")
    averager = compat.PeriodicModelAverager(period=1)
    for _ in range(2):
        averager.average_parameters(model.parameters())
        sum(p.sum() for p in model.parameters())
    return bool(races())


def fsdp(rank, at_once=False):
    model = build().to("emulated")
    mesh = init_device_mesh("emulated", (2,), mesh_dim_names=("shards",))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    with gl.attach(model, "Mean()"):
        for step in range(3):
            model(batch(rank, step)).square().mean().backward()
            [p.grad.to_local() + 1 for p in model.parameters()]
            if not at_once:  # otherwise FSDP adds to these gradients
                model.zero_grad()
    return bool(races())


def fsdp_that_adds(rank):
    return fsdp(rank, at_once=True)


STREAM = "lane/stream.py"
ORDER = Point(
    STREAM, "StreamLane.order", "torch.accelerator.current_stream(self._device).wait_stream(self._stream)"
)
ON_STREAM = ("lane/perform.py", "perform_on_stream")

NEEDED = {  # place: what shows that it is needed, on how many ranks
    Point(STREAM, "StreamLane._working",
          "self._stream.wait_stream(torch.accelerator.current_stream(self._device))"): (mean, 2),
    Point(STREAM, "StreamLane.submit", "used_by_current_stream(bucket.flat)"): (resumed_copies, 2),
    Point("core/memory.py", "Memory._moved_to", "used_by_current_stream(old)"): (resumed_run, 2),
    Point("core/streams.py", "used_by_current_stream",
          "tensor.record_stream(torch.accelerator.current_stream(tensor.device))"): (resumed_copies, 2),
    Point("lane/perform.py", "reduce_on_stream", "_reduce(group, tensor, op).wait()"): (mean, 2),
    Point(*ON_STREAM, "_reduce(group, tensor, request.op).wait()"): (mean, 2),
    Point(*ON_STREAM, "reduce_scatter_base(group, part, tensor).wait()"): (fsdp, 2),
    Point(*ON_STREAM, "group.allgather([list(received.unbind())], [message]).wait()"): (gathered, 2),
    Point(*ON_STREAM, "group.alltoall_base(received.view(-1), torch.cat(outgoing), [width] * size, "
          "splits).wait()"): (sharded, 3),
    Point("lane/stream_commit.py", "StreamCommit.send",
          "self._copied.record(torch.accelerator.current_stream(self._row.device))"): (nan_skips, 2),
    Point("lane/device_clock.py", "DeviceClock.mark",
          "event.record(torch.accelerator.current_stream(self._device))"): (observed, 2),
    Point("strategies/auto/moments.py", "DeviceMoment.__init__",
          "self._event.record(torch.accelerator.current_stream(device))"): (tuned, 2),
    Point("strategies/auto/moments.py", "DeviceMoment.__sub__", "self._event.synchronize()"): (tuned, 2),
    Point("feed/fsdp.py", "FsdpFeed._submit", "answer.wait()"): (fsdp_that_adds, 2),
}  # fmt: skip

FUTURE = Point("lane/requests.py", "Job.__init__",
               "Future(devices=[] if device.type == 'cpu' else devices_of_futures(device))")  # fmt: skip

NEEDED_WITHOUT = {  # the same, where another place does the same, which is removed too
    ORDER: (mean, FUTURE),
    FUTURE: (mean, ORDER),
    Point("feed/resumed_buckets.py", "ResumedBuckets.submit",
          "Future(devices=devices_of_futures(bucket.flat.device))"): (resumed_run, ORDER),
    Point("lane/outside_steps.py", "perform_now", "future.wait()"): (outside, ORDER),
}  # fmt: skip

AFTER_A_WAIT = {  # the host has waited for the end of the step by then
    Point("feed/averaging.py", "average_weights", "answer.wait()"): averaged,
    Point("feed/drift.py", "DriftCheck._gathered", "answer.wait()"): compared,
    Point("feed/fsdp.py", "FsdpFeed._backward_ended", "answer.wait()"): fsdp,
    Point("feed/own_loop.py", "OwnLoopFeed.reduce", "anywhere.wait()"): own_loop_without_a_gradient,
    Point("feed/own_loop.py", "OwnLoopFeed.reduce", "answer.wait()"): own_loop,
    Point("feed/rounds.py", "Round.complete", "answer.wait()"): rounds,
}

OF_THE_HOST = {  # no stream is ordered there
    Point("lane/perform.py", "Pending.wait", "self._works.popleft().wait()"): "Gloo",
    Point("lane/perform.py", "commit", "_reduce(group, bounds, 'max').wait()"): "Gloo",
    Point("lane/requests.py", "Requests.wait", "issued.pending.wait()"): "Gloo",
    Point("plan/prober.py", "Prober._issued.wait", "future.wait()"): "it measures, and then waits for all",
    Point("plan/prober.py", "Prober._time", "torch.accelerator.synchronize()"): "it measures",
    Point("plan/echo_driver.py", "Echo.clock", "torch.accelerator.synchronize()"): "it measures",
}  # fmt: skip


def test_all_places_are_known():
    """A new one belongs into one of the tables."""
    found = order_points()
    assert set(found) == {*NEEDED, *NEEDED_WITHOUT, *AFTER_A_WAIT, *OF_THE_HOST}
    assert len(found) == len(set(found))


def without(rank, points, scenario):
    for point in points:
        remove(point)
    return scenario(rank)


def cases(points, quick=()):
    return [pytest.param(p, id=str(p), marks=[] if p in quick else pytest.mark.slow) for p in points]


KEPT = Point(STREAM, "StreamLane.submit", "used_by_current_stream(bucket.flat)")


@needs_compiler
@pytest.mark.parametrize("point", cases([*NEEDED, *NEEDED_WITHOUT], quick={ORDER, KEPT}))
def test_a_missing_place_is_found(point):
    if point in NEEDED:
        scenario, world = NEEDED[point]
        assert any(run(without, world, [point], scenario))
    else:
        scenario, other = NEEDED_WITHOUT[point]
        assert any(run(without, 2, [point, other], scenario))
        assert not any(run(without, 2, [other], scenario))


@needs_compiler
@pytest.mark.parametrize("point", cases(AFTER_A_WAIT))
def test_after_a_wait_of_the_host_streams_are_in_order(point):
    assert not any(run(without, 2, [point], AFTER_A_WAIT[point]))


SCENARIOS = sorted(set(NEEDED.values()), key=str)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "world"), SCENARIOS)
def test_nothing_is_found_where_none_is_missing(scenario, world):
    assert not any(run(without, world, [], scenario))
