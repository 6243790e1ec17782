"""The lane on a device: every kernel comes after what it needs, and the host waits once a step."""

import numpy as np
import pytest
import torch

import gradlane as gl

from .ranks import needs_compiler, run, some_of, train

pytestmark = needs_compiler

INT8 = "ErrorFeedback(Sharded(Int8()))"
WAYS = (
    (INT8, {"verify_every": 2}, 3),
    ("Mean()", {"verify_every": 2}, 2),
    ("Mean()", {"nonfinite": "propagate"}, 2),
    ("ErrorFeedback(PowerSGD(2))", {}, 3),
)


@gl.strategy_from
async def mean_of_a_copy(bucket):
    return await gl.all_reduce(bucket.flat * 1.0)


def checked(rank, strategy, options):
    return train(rank, strategy, options=options)


def resumed(rank, strategy):
    """A new model goes on with the state of another: its first steps have regrouped buckets, and memory that
    was loaded on another stream."""
    states, strategy = [], {"of a copy": mean_of_a_copy}.get(strategy, strategy)
    train(rank, strategy, steps=2, cap=0.01, between=lambda own, *_: states.append(own.state_dict()))

    def load(attachment, ddp, step, rank):
        if step == 0:
            attachment.load_state_dict(states.pop())

    # Otherwise the check for NaN keeps every bucket for the length of a step.
    return train(rank, strategy, faults=load, steps=2, cap=0.01, options={"nonfinite": "propagate"})


@pytest.mark.parametrize(("strategy", "options", "world"), some_of(WAYS, WAYS[0]))
def test_streams_are_ordered_and_replicas_are_equal(strategy, options, world):
    found = run(checked, world, strategy, options)
    for own in found:
        assert own.races == []
        assert own.errors == []
        assert np.array_equal(own.weights, found[0].weights)
    for step in range(4):
        assert all(np.array_equal(own.gradients[step], found[0].gradients[step]) for own in found)


@pytest.mark.parametrize("strategy", some_of(("Mean()", INT8), INT8))
def test_a_resumed_run_is_ordered_too(strategy):
    for own in run(resumed, 2, strategy):
        assert (own.races, own.errors) == ([], [])


@pytest.mark.parametrize("strategy", ["Mean()", INT8, "ErrorFeedback(PowerSGD(2, min_compression_rate=1))"])
def test_the_host_waits_once_a_step(strategy):
    for own in run(checked, 2, strategy, {}):
        assert (own.waits, own.all_waits) == ({}, 1)


def skipping(rank):
    """A NaN in the second step: in the next hundred each rank looks at its own gradients too."""

    handles = []

    def spoil(attachment, ddp, step, rank):
        if rank == 1 and step == 1:
            handles.append(ddp.module.last.bias.register_hook(lambda grad: grad * float("nan")))
        if step == 2:
            [handle.remove() for handle in handles]

    return train(rank, INT8, faults=spoil)


def test_the_host_waits_once_after_a_skip_too():
    for own in run(skipping, 2):
        assert own.metrics["comm/skipped"] == 1
        assert (own.waits, own.all_waits) == ({}, 1)


class Scaler:
    """As a GradScaler on a device: the scale is there."""

    def __init__(self):
        self.scale = torch.full((), 1024.0, device="emulated")

    def get_scale(self):
        return self.scale.item()


def scaled(rank):
    return train(rank, "ErrorFeedback(Sharded(Int8()))", cap=0.01, options={"scaler": Scaler()})


def test_the_loss_scale_is_asked_for_once_a_step():
    for own in run(scaled, 2):
        ((what, where),) = own.waits
        assert (what, own.all_waits) == ("item", 2)
        assert "feed/step.py" in where
