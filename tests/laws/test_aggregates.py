"""Aggregates get every rank's row, in rank order, and answer for all of them."""

import itertools
import math

import pytest
import torch

import gradlane as gl
from gradlane.core.running import Running
from gradlane.simulate.answers import exchange

from ..support.catalogue import Clipped, median
from .test_laws import SHAPES, gradients

EXCHANGES = (gl.Gathered, gl.Sharded)
both = pytest.mark.parametrize("make", EXCHANGES)


def stacked(given, key):
    return torch.stack([own[key] for own in given])


@both
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("bucket_bytes", [None, 64])
def test_raw_rows_are_the_gradients(make, world, bucket_bytes):
    """Element by element the same as on the stacked gradients, whatever the shards and buckets."""
    for aggregate in (median, lambda rows: rows[0], lambda rows: rows[-1], lambda rows: rows.amax(0)):
        given = gradients(world)
        ranks = gl.Simulation(make(gl.Raw(), aggregate), world=world, bucket_bytes=bucket_bytes)
        answer = ranks.step(given)[0]
        for key, shape in SHAPES.items():
            rows = stacked(given, key).view(world, -1)
            expected = aggregate(rows.clone()).view(shape) if rows.numel() else rows[0].view(shape)
            assert torch.equal(answer[key], expected)


@both
def test_a_mean_of_ones_own_is_the_mean_up_to_rounding(make):
    given = gradients(4)
    known = gl.Simulation(make(gl.Int8(block=32)), world=4).step(given)[0]
    own = gl.Simulation(make(gl.Int8(block=32), lambda rows: gl.mean(rows)), world=4).step(given)[0]
    for key in SHAPES:
        torch.testing.assert_close(known[key], own[key], rtol=1e-5, atol=0.03)  # a code may go the other way


def test_the_residual_does_not_depend_on_the_aggregate():
    worlds = [
        gl.Simulation(gl.ErrorFeedback(gl.Gathered(gl.Int4(block=32), aggregate)), world=3)
        for aggregate in (gl.mean, median)
    ]
    for step in range(3):
        for ranks in worlds:
            ranks.step(gradients(3, step))
    first, second = (ranks.strategies[1].memory.state_dict() for ranks in worlds)
    assert all(torch.equal(first[key], second[key]) for key in SHAPES)


@pytest.mark.parametrize(("aggregate", "expected"), [(gl.mean, 2.0), (median, 1.0)])
def test_only_the_mean_divides_by_those_who_have_not_joined(aggregate, expected):
    layout = (gl.Slot("w", torch.Size([8])),)
    ranks = []
    for rank, value in enumerate((1.0, 3.0, 0.0)):  # the last has joined
        flat = torch.full((8,), value)
        bucket = gl.Bucket(flat, layout, 0, rank, 3, joined=rank == 2, sizes={"world": 2})
        ranks.append(Running(gl.Gathered(gl.Raw(), aggregate), bucket, lambda bucket, note: None))
    answers = exchange([rank.resume() for rank in ranks], [rank.bucket for rank in ranks])
    for rank, answer in zip(ranks, answers, strict=True):
        assert rank.resume(answer).mean.tolist() == [expected] * 8


@both
@pytest.mark.parametrize("rule", [gl.Median(), gl.TrimmedMean(1), gl.NearMedian(2)], ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_rules_in_an_exchange_answer_nan_where_a_rank_has_one(make, rule, order):
    """A NaN has no place in an order: sorted with the others it could bring any of them to the middle."""
    rows = torch.tensor([[1.0, math.nan, 2.0], [2.0, 1e30, 1e30], [3.0, 1.0, math.inf], [4.0, 2.0, 3.0]])
    given = [{"w": rows[place].repeat(30)} for place in order]
    answer = gl.Simulation(make(gl.Raw(), rule), world=4).step(given)[0]["w"].view(30, 3)
    assert answer[:, 0].isfinite().all()
    assert answer[:, 1].isnan().all()
    assert not answer[:, 2].isnan().any()  # inf is larger than all


@both
@pytest.mark.parametrize(
    ("aggregate", "error", "message"),
    [
        (lambda rows: rows, gl.InvalidValue, r"float32\[2, 66\].* of float32\[2, 66\]; return float32\[66\]"),
        (lambda rows: rows.mean(0).double(), gl.InvalidValue, r"made float64\[66\]"),
        (lambda rows: rows.mean(), gl.InvalidValue, r"made float32\[\]"),
        (lambda rows: None, gl.WrongType, "<lambda> returned NoneType; return float32"),
    ],
)
def test_what_an_aggregate_returns_is_checked(make, aggregate, error, message):
    with pytest.raises(error, match=message):
        gl.Simulation(make(gl.Raw(), aggregate), world=2).step([{"w": torch.ones(66)}] * 2)


@both
def test_what_is_no_aggregate_is_refused_at_once(make):
    with pytest.raises(gl.WrongType, match=r"got the class Clipped; write Clipped\(\)"):
        make(gl.Raw(), Clipped)
    with pytest.raises(gl.WrongType, match="aggregate=3 cannot be called; use a function"):
        make(gl.Raw(), 3)
    with pytest.raises(gl.WrongType, match="aggregate=True cannot be called"):
        make(gl.Raw(), True)


def test_a_dry_run_asks_no_aggregate():
    def never(rows):
        raise AssertionError

    trace = gl.dry_run(gl.Sharded(gl.Raw(), never), {"w": (4096,)}, world=4)
    assert trace.wire_bytes == gl.dry_run(gl.Sharded(gl.Raw()), {"w": (4096,)}, world=4).wire_bytes
