"""What Private promises: a bound on every worker, noise that nobody can draw again, and a true ledger."""

import dataclasses
import io
import math

import pytest
import torch

import gradlane as gl
from gradlane.core.collectives import StepSum
from gradlane.core.running import Running, step_total

from ..reference.private import clipped_sum
from .test_laws import SHAPES, gradients

NUMEL = 200_000


def gives(running):
    """What it gives to the sum, when all ranks have said that their gradients are finite."""
    assert isinstance(running.resume(), StepSum)
    asked = running.resume(step_total([running]))
    assert str(asked) == "all_reduce max(int32[1])"
    return running.resume(torch.zeros(1, dtype=torch.int32)).payloads[0][0]


def shares_given(world, strategy=None, steps=1, numel=NUMEL):
    """What each rank puts on the wire, of a gradient of zeros."""
    layout = (gl.Slot("w", torch.Size([numel])),)
    given = []
    for step in range(steps):
        for rank in range(world):
            bucket = gl.Bucket(torch.zeros(numel), layout, step, rank, world)
            running = Running(
                strategy or gl.Private(gl.Mean(), clip=0.5, noise_multiplier=3.0),
                bucket,
                lambda bucket, note: None,
            )
            given.append(gives(running).clone())
            running.close()
    return torch.stack(given).double()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [None, 64])
@pytest.mark.parametrize("clip", [0.1, 3.0, 1e3])
def test_each_worker_is_clipped_as_a_whole(world, bucket_bytes, clip):
    given = gradients(world)
    ranks = gl.Simulation(
        gl.Private(gl.Mean(), clip, noise_multiplier=0.0), world=world, bucket_bytes=bucket_bytes
    )
    answer = ranks.step(given)[0]
    wanted = clipped_sum(given, clip)
    for key in SHAPES:
        torch.testing.assert_close(answer[key].double() * world, wanted[key], rtol=3e-6, atol=1e-9)
    assert ranks.figures["private_clipped"] == (world if clip < 5 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_no_contribution_is_above_the_clip(dtype, scale):
    """Rounding included: of one rank the answer is its contribution."""
    for seed in range(20):
        (own,) = gradients(1, seed, dtype)
        clip = 0.7 * scale
        ranks = gl.Simulation(gl.Private(gl.Mean(), clip, noise_multiplier=0.0), world=1, bucket_bytes=64)
        answer = ranks.step([{key: value * scale for key, value in own.items()}])[0]
        norm = math.sqrt(sum(value.double().square().sum().item() for value in answer.values()))
        assert clip * 0.99999 < norm <= clip


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_is_refused_by_all_before_anything_is_sent(world, bad):
    given = gradients(world)
    given[1]["b.weight"][0, 0, 0] = bad
    ranks = gl.Simulation(
        gl.Private(gl.PowerSGD(1, 1), 1.0, noise_multiplier=1.0), world=world, bucket_bytes=64
    )
    for answer in ranks.step(given):
        assert all(value.isnan().all() for value in answer.values())  # every bucket, not only that one
    assert [(event.kind, event.payload_bytes) for event in ranks.events] == [("all_reduce", 4)]
    assert ranks.figures["private_nonfinite"] == 1
    assert [one.spent.steps for one in ranks.strategies] == [0] * world
    assert all(one.inner.factors.state_dict() == {} for one in ranks.strategies)
    ranks.step(gradients(world))
    assert [one.spent.steps for one in ranks.strategies] == [1] * world


def test_a_rank_that_is_not_chosen_shows_nothing_of_what_it_holds():
    """Privacy by sampling would be gone if a step were skipped because of a worker that takes no part."""
    ranks = gl.Simulation(
        gl.Private(gl.Mean(), 1e3, noise_multiplier=0.0, sample_rate=1e-9), world=3, bucket_bytes=8
    )
    bad = [{"a": torch.full((2,), math.nan), "b": torch.ones(2)} for _ in range(3)]
    for answer in ranks.step(bad):
        assert all(torch.equal(value, torch.zeros(2)) for value in answer.values())
    assert ranks.figures["private_nonfinite"] == 3
    assert ranks.strategies[0].spent.steps == 1


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("inner", [gl.Mean(), gl.Cast(gl.Mean(), torch.bfloat16), gl.Summed(gl.Raw())])
def test_the_noise_of_the_mean_is_that_of_the_sum_over_n(world, inner):
    ranks = gl.Simulation(
        gl.Private(inner, clip=0.5, noise_multiplier=3.0), world=world, bucket_bytes=4 * NUMEL
    )
    zeros = [{"a": torch.zeros(NUMEL), "b": torch.zeros(NUMEL)} for _ in range(world)]
    answer = ranks.step(zeros)[0]
    for noise in answer.values():
        noise = noise.double() * world / (3.0 * 0.5)  # N(0, 1), if all is well
        assert noise.mean().abs() < 0.02
        assert noise.var().item() == pytest.approx(1, rel=0.05)
        assert noise.pow(4).mean().item() == pytest.approx(3, rel=0.05)
        assert 0.0020 < (noise.abs() > 3).double().mean() < 0.0034  # 0.0027


def test_ranks_steps_and_runs_are_uncorrelated():
    drawn = torch.cat([shares_given(4, steps=2), shares_given(2)])
    correlation = torch.corrcoef(drawn) - torch.eye(10)
    assert correlation.abs().max() < 0.012  # five deviations of 200,000 pairs
    first, second = drawn[0][: NUMEL // 2], drawn[0][NUMEL // 2 :]
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.015


def test_buckets_of_the_same_name_and_place_differ():
    """No seed is a function of place here."""
    strategy = gl.Private(gl.Mean(), 1.0, 1.0)
    assert not torch.equal(*shares_given(1, strategy, steps=2, numel=100))


def test_a_rank_that_joined_adds_its_noise():
    layout = (gl.Slot("w", torch.Size([NUMEL])),)
    bucket = gl.Bucket(torch.zeros(NUMEL), layout, 0, 1, 2, joined=True)
    running = Running(gl.Private(gl.Mean(), 1.0, 1.0), bucket, lambda bucket, note: None)
    assert gives(running).var().item() == pytest.approx(0.5, rel=0.05)


def test_noise_of_double_gradients_and_of_narrow_ones():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        ranks = gl.Simulation(gl.Private(gl.Mean(), 1.0, 2.0), world=2)
        answer = ranks.step([{"w": torch.zeros(NUMEL, dtype=dtype)} for _ in range(2)])[1]["w"]
        assert answer.dtype == dtype
        assert answer.double().var().item() == pytest.approx(1, rel=0.05)


def test_sampling_leaves_workers_out_and_divides_by_what_is_expected():
    ranks = gl.Simulation(
        gl.Private(gl.Mean(), 1e3, noise_multiplier=0.0, sample_rate=0.25), world=4, bucket_bytes=8
    )
    ones = [{"a": torch.ones(2), "b": torch.ones(2)} for _ in range(4)]
    answers = [ranks.step(ones)[0] for _ in range(400)]
    counts = torch.stack([answer["a"][0] for answer in answers])
    assert set(counts.tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}  # of 4 workers, over 4 * 0.25
    assert all(torch.equal(answer["a"], answer["b"]) for answer in answers)  # one coin for all buckets
    assert counts.mean().item() == pytest.approx(1.0, abs=0.25)  # its deviation is 0.043
    assert 0.4 < counts.var().item() < 1.2  # 4 q (1 - q) = 0.75


def test_the_ledger_counts_steps_whatever_the_buckets_and_survives_a_checkpoint():
    ranks = gl.Simulation(
        gl.Cast(gl.Private(gl.Mean(), 1.0, 1.5, sample_rate=0.5), torch.bfloat16), world=2, bucket_bytes=64
    )
    for step in range(3):
        ranks.step(gradients(2, step))
    private = ranks.strategies[0].inner
    assert private.spent.steps == 3
    assert private.epsilon(1e-5) == private.epsilon(1e-5, steps=3) > 0
    file = io.BytesIO()
    torch.save(ranks.strategies[0].state_dict(), file)
    file.seek(0)
    again = gl.Cast(gl.Private(gl.Mean(), 1.0, 1.5, sample_rate=0.5), torch.bfloat16)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.inner.epsilon(1e-5) == private.epsilon(1e-5)
    gl.Simulation([again]).step(gradients(1))
    assert again.inner.spent.steps == 4
    with pytest.raises(gl.InvalidValue, match=r"this Private has noise_multiplier=2\.0"):
        gl.Private(gl.Mean(), 1.0, 2.0, sample_rate=0.5).load_state_dict(private.state_dict())
    with pytest.raises(gl.InvalidValue, match="this one nothing"):
        gl.Private(gl.Mean(), 1.0, 2.0).load_state_dict({})


def test_a_step_that_fails_is_counted_because_something_was_sent():
    @gl.strategy_from
    async def fails(bucket):
        raise RuntimeError("after the noise")

    type(fails).linear, before = True, type(fails).linear
    try:
        private = gl.Private(fails, 1.0, 1.0)
    finally:
        type(fails).linear = before
    for _ in range(2):  # the same step again
        with pytest.raises(RuntimeError, match="after the noise"):
            gl.Simulation([private]).step(gradients(1))
    assert private.spent.steps == 2


def test_ranks_that_came_differently_far_in_a_failed_step_count_it_alike():
    early, late = (gl.Private(gl.Mean(), 1.0, 1.0).spent for _ in range(2))
    for spent in (early, late):
        spent.steps += 1
        spent.keep()
    late.steps += 1  # the other failed before it had sent anything
    early.undo()
    late.undo()
    assert early.steps == late.steps == 2
    late.steps += 1
    late.skip()  # sent, and skipped by all
    late.skip()  # skipped by all before anything was sent
    assert late.steps == 3


def test_a_dry_run_spends_nothing():
    private = gl.Private(gl.PowerSGD(1), 1.0, 1.0)
    trace = gl.dry_run(private, {"w": (100, 100)}, world=4, bucket_bytes=64)
    assert trace.collectives == 3  # P, Q, and before them whether all are finite
    assert private.spent.steps == 0


INSIDE = [
    gl.ErrorFeedback(gl.Summed(gl.RandomK(0.1))),
    gl.EF21(gl.Gathered(gl.TopK(0.1))),
    gl.DGC(0.1),
    gl.Sharded(gl.Int8()),
    gl.Gathered(gl.Sign()),
    gl.WeightedMean(1.0),
    gl.After(3, then=gl.ErrorFeedback(gl.PowerSGD(1))),
    gl.Route({"a*": gl.DGC(0.1)}),
    gl.Cast(gl.WorkerMomentum(gl.Mean()), torch.bfloat16),
    gl.Noop(),
    gl.Private(gl.Mean(), 1.0, 1.0),
]


@pytest.mark.parametrize("inner", INSIDE, ids=gl.describe)
def test_what_breaks_the_bound_is_refused_inside(inner):
    with pytest.raises(gl.InvalidValue, match=r"Private cannot hold \w+: .* without feedback"):
        gl.Private(inner, 1.0, 1.0)


OUTSIDE = [
    lambda private: gl.ErrorFeedback(private),
    lambda private: gl.EF21(gl.Cast(private, torch.bfloat16)),
    lambda private: gl.WeightedMean(1.0, private),
    lambda private: gl.After(10, then=private),
    lambda private: gl.After(10, then=gl.Mean(), first=private),
    lambda private: gl.Route({"a*": private}),
    lambda private: gl.Route({"a*": gl.Mean()}, otherwise=private),
]


@pytest.mark.parametrize("wrap", OUTSIDE)
def test_what_breaks_the_bound_is_refused_outside(wrap):
    with pytest.raises(gl.InvalidValue, match="Private is the outermost, but for Cast"):
        wrap(gl.Private(gl.Mean(), 1.0, 1.0))


def test_fp16_on_the_wire_is_refused():
    with pytest.raises(gl.InvalidValue, match="use bfloat16"):
        gl.Private(gl.Cast(gl.Mean(), torch.float16), 1.0, 1.0)
    with pytest.raises(gl.InvalidValue, match="use bfloat16"):
        gl.Cast(gl.Cast(gl.Private(gl.Mean(), 1.0, 1.0), torch.float32), torch.float16)

    class Narrows(gl.Strategy):
        async def reduce(self, bucket):
            narrow = dataclasses.replace(bucket, wire=torch.float16)
            return await gl.Private(gl.Mean(), 1.0, 1.0).reduce(narrow)

    with pytest.raises(gl.InvalidValue, match="use bfloat16"):
        gl.Simulation(Narrows(), world=2).step(gradients(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0, "noise_multiplier": 1.0}, "clip=0.0; use a norm above 0"),
        ({"clip": math.inf, "noise_multiplier": 1.0}, "clip=inf"),
        ({"clip": 1.0, "noise_multiplier": -1.0}, "noise_multiplier=-1.0; use a multiple of clip"),
        ({"clip": 1.0, "noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.0}, "sample_rate=0.0"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "sample_rate": 1.5}, "sample_rate=1.5"),
        ({"clip": "1", "noise_multiplier": 1.0}, "clip='1'; use a norm above 0"),
        ({"clip": 1.0, "noise_multiplier": None}, "noise_multiplier=None; use a multiple of clip"),
        ({"clip": 1.0, "noise_multiplier": 1.0, "sample_rate": "x"}, "sample_rate='x'; use a probability"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(gl.InvalidValue, match=message):
        gl.Private(gl.Mean(), **options)
    with pytest.raises(gl.WrongType, match="wraps a strategy, got Int8"):
        gl.Private(gl.Int8(), 1.0, 1.0)


def test_no_noise_is_allowed_and_said(caplog):
    private = gl.Private(gl.Mean(), 1.0, 0.0)
    assert "hides nothing" in caplog.text
    gl.Simulation([private]).step(gradients(1))
    assert private.epsilon(1e-5) == math.inf


def test_epsilon_and_the_docstring_say_whose_privacy_it_is():
    assert "never for single examples" in gl.Private.__doc__
    assert "*per worker*, never per example" in gl.Private.epsilon.__doc__


def test_sparse_gradients_are_refused():
    rows = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (5, 4), check_invariants=True)
    with pytest.raises(gl.WrongType, match="cannot hide the sparse gradient of 'table'"):
        gl.Simulation(gl.Private(gl.Mean(), 1.0, 1.0), world=2).step([{"table": rows}] * 2)
