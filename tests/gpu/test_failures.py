"""A rank that fails a step on a device: the others learn it in the same step, and the order stays."""

import importlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import gradlane as gl
from gradlane.feed import drift

from .ranks import needs_compiler, run, some_of, train

pytestmark = needs_compiler


@dataclass
class Breaks(gl.Strategy):
    """A mean in two requests; numbers that are not finite on a rank make it raise there, where they are
    known."""

    before: bool
    bucket: int

    async def reduce(self, bucket):
        flat = bucket.flat
        if self.before and self.must_break(bucket):
            raise ArithmeticError("here")
        (total,) = (await gl.all_reduce(flat, op="sum"),)
        if not self.before and self.must_break(bucket):
            raise ArithmeticError("here")
        everyone = await gl.all_gather((total[:1].clone(),))
        assert len(everyone) == bucket.world
        return gl.Reduced(total.div_(bucket.world))

    def must_break(self, bucket):
        return (bucket.rank, bucket.step, bucket.index) == (1, 1, self.bucket) and not bucket.flat.is_meta


def breaking(rank, before, bucket, options):
    return train(rank, Breaks(before, bucket), cap=0.01, steps=3, options=options)


GRID = [(True, 0, "skip"), (True, 2, "raise"), (False, 0, "raise"), (False, 2, "skip")]


@pytest.mark.parametrize(("before", "bucket", "nonfinite"), some_of(GRID, GRID[-1]))
def test_all_ranks_lose_one_step_and_go_on(before, bucket, nonfinite):
    found = run(breaking, 3, before, bucket, {"nonfinite": nonfinite})
    for rank, own in enumerate(found):
        ((step, kind, message),) = own.errors
        assert (step, kind) == (1, "ArithmeticError" if rank == 1 else "PeerFailed")
        assert "here" in message
        assert rank == 1 or "rank 1 raised ArithmeticError" in message
        assert (own.races, own.steps) == ([], 3)
        assert np.array_equal(own.weights, found[0].weights)
        assert np.array_equal(own.gradients[2], found[0].gradients[2])


@gl.strategy_from
async def breaks_everywhere(bucket):
    if bucket.step == 1:
        raise ArithmeticError("on every rank")
    return await gl.all_reduce(bucket.flat)


@gl.strategy_from
async def breaks_on_meta_too(bucket):
    if bucket.step == 1 and bucket.rank == 1 and bucket.index == 1:
        raise ArithmeticError("for good")
    return await gl.all_reduce(bucket.flat)


def trained(rank, strategy):
    return train(rank, {"everywhere": breaks_everywhere, "for good": breaks_on_meta_too}[strategy], cap=0.01)


def test_an_error_of_all_ranks_costs_one_step():
    found = run(trained, 2, "everywhere")
    for own in found:
        assert [error[:2] for error in own.errors] == [(1, "ArithmeticError")]
        assert np.array_equal(own.weights, found[0].weights)


def test_a_rank_that_cannot_go_on_ends_the_groups_and_all_ranks_say_why():
    for rank, own in enumerate(run(trained, 2, "for good")):
        first, *later = own.errors
        assert first[:2] == (1, "ArithmeticError" if rank == 1 else "PeerFailed")
        assert "for good" in first[2]
        assert [error[:2] for error in later] == [(2, "WrongState"), (3, "WrongState")]
        assert all("start the job again" in message for _, _, message in later)


def refused(rank):
    """Something on rank 1 is against a step, before it begins."""

    def objects(attachment, ddp, step, rank):
        if rank == 1:
            attachment._step.on_begin = lambda joined: ValueError("not this one") if step == 1 else None

    return train(rank, "ErrorFeedback(Sharded(Int8()))", cap=0.01, steps=3, faults=objects)


def test_a_step_that_one_rank_refuses_is_lost_on_all_and_no_other():
    found = run(refused, 2)
    for rank, own in enumerate(found):
        ((step, kind, message),) = own.errors
        assert (step, kind) == (1, "PeerFailed" if rank == 0 else "ValueError")
        assert "not this one" in message
        assert np.array_equal(own.weights, found[0].weights)


def not_finite(rank, strategy, options):
    """Rank 1 alone has a NaN, in one step."""

    def spoil(attachment, ddp, step, rank):
        if rank == 1 and step == 1:
            ddp.module.last.bias.register_hook(lambda grad: grad * float("nan"))

    return train(rank, strategy, faults=spoil, steps=2, options=options)


@pytest.mark.parametrize("strategy", ["ErrorFeedback(Sharded(Int8()))"])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(strategy):
    found = run(not_finite, 2, strategy, {})
    for own in found:
        assert own.errors == []
        assert own.metrics["comm/skipped"] == 1
        assert np.isfinite(own.weights).all()
        assert np.array_equal(own.weights, found[0].weights)


def test_a_step_that_is_not_finite_is_an_error_on_all_ranks():
    for own in run(not_finite, 2, "Noop()", {"nonfinite": "raise"}):
        assert [error[:2] for error in own.errors] == [(1, "NonFinite")]


def drifting(rank, there):
    """Rank 1 of three changes the last bit of a weight."""
    device = importlib.import_module(f"{__package__}.device")

    def nudge(attachment, ddp, step, rank):
        if rank == 1 and step == 1:
            ddp.module.layers[1].weight.data.view(torch.int32)[3, 4] += 1
        if step == 1:
            device.log.clear()

    copied = []

    def look(attachment, ddp, step, rank):
        kernels = [kernel for kernel in device.log.kernels if "drift.py" in kernel.where]
        copied.append(sum(kernel.bytes for kernel in kernels if kernel.name == "copy to the host"))

    if not there:
        drift.hashes_of = lambda weights: {name: drift.hashed(w) for name, w in weights.items()}
    found = train(rank, "Mean()", steps=2, faults=nudge, between=look, options={"verify_every": 2})
    return found.errors, copied[-1]


@pytest.mark.parametrize("there", some_of((True, False), (True,)))
def test_replicas_that_differ_in_one_bit_are_found(there):
    for errors, copied in run(drifting, 3, there):
        ((step, kind, message),) = errors
        assert (step, kind) == (1, "RanksDisagree")
        assert "rank 1 of 3 has drifted from the others in layers.1.weight" in message
        assert (copied < 2000) == there
