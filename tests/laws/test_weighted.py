"""Weighted means: against fp64, whatever carries them, however uneven the ranks."""

import copy
import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradlane as gl
from gradlane.core.bucket import Feedback
from gradlane.strategies.device_weights import shares_on_device
from gradlane.strategies.weights import shares

from .test_laws import SHAPES, gradients

WEIGHTS = [(1.0, 3.0, 2.0), (1e6, 1.0, 0.0), (0.0, 0.0, 1e-3), (0.3, 1e-6, 0.7), (1e12, 1e6, 1e12), (5, 0, 0)]
CARRIERS = {
    "mean": lambda w: gl.WeightedMean(w),
    "raw, gathered": lambda w: gl.WeightedMean(w, gl.Gathered(gl.Raw())),
    "raw, sharded": lambda w: gl.WeightedMean(w, gl.Sharded(gl.Raw())),
    "raw, summed": lambda w: gl.WeightedMean(w, gl.Summed(gl.Raw())),
    "a largest share that none has": lambda w: gl.WeightedMean(w, max_share=1.0),
    "routed": lambda w: gl.WeightedMean(w, gl.Route({"*.bias": gl.Sharded(gl.Raw())})),
}


def exact(given, weights, key):
    used = [(w, own[key].double()) for w, own in zip(weights, given, strict=True) if w]
    return sum(w * g for w, g in used) / math.fsum(w for w, _ in used)


def relative_error(found, wanted):
    if not wanted.numel():
        return 0.0
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def reduced(make, weights, given, **options):
    return gl.Simulation([make(w) for w in weights], **options).step(given)[0]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_against_fp64(carrier, weights):
    given = gradients(3)
    answer = reduced(CARRIERS[carrier], weights, given, bucket_bytes=64)
    assert max(relative_error(answer[key], exact(given, weights, key)) for key in SHAPES) <= 1e-6


@pytest.mark.parametrize(("dtype", "slack"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_a_cast_rounds_gradients_and_not_weights(weights, dtype, slack):
    given = gradients(3)
    for make in (
        lambda w: gl.Cast(gl.WeightedMean(w), dtype),
        lambda w: gl.WeightedMean(w, gl.Cast(gl.Mean(), dtype)),
    ):
        answer = reduced(make, weights, given)
        assert max(relative_error(answer[key], exact(given, weights, key)) for key in SHAPES) <= slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [257.0, 100_000.0])
def test_weights_that_the_wire_could_not_hold(weight, dtype):
    """257 is no number of bf16, and 100,000 is infinite in fp16."""
    given = [{"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([7.0, 7.0])}]
    answer = reduced(lambda w: gl.Cast(gl.WeightedMean(w), dtype), (weight, 0.0), given)
    assert answer["w"].tolist() == [3.0, 1.0]


@pytest.mark.parametrize(("codec", "slack"), [(gl.Int8(block=32), 0.02), (gl.Fp8(block=32), 0.1)])
def test_codecs_lose_what_they_would_lose_of_a_mean(codec, slack):
    given, weights = gradients(4), (4.0, 1.0, 0.0, 2.0)
    answer = reduced(lambda w: gl.WeightedMean(w, gl.Sharded(codec)), weights, given)
    assert max(relative_error(answer[key], exact(given, weights, key)) for key in SHAPES) <= slack


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_weighed_in_fp32(dtype):
    given = [{"w": torch.full((4,), 4e4 if dtype == torch.float16 else 1e37, dtype=dtype)} for _ in range(4)]
    answer = reduced(lambda w: gl.WeightedMean(w, gl.Sharded(gl.Raw())), (9, 1, 1, 1), given)
    assert answer["w"].dtype == dtype
    torch.testing.assert_close(answer["w"], given[0]["w"])


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_a_rank_of_weight_zero_holds_is_not_heard(carrier):
    given = gradients(3)
    given[1] = {key: torch.full_like(value, math.nan) for key, value in given[1].items()}
    answer = reduced(CARRIERS[carrier], (2.0, 0.0, 1.0), given)
    assert all(value.isfinite().all() for value in answer.values())


@pytest.mark.parametrize("carrier", CARRIERS)
def test_nobody_with_a_weight_is_refused_on_every_rank(carrier):
    with pytest.raises(gl.InvalidValue, match="weights of all 3 ranks add up to 0 in step 0"):
        reduced(CARRIERS[carrier], (0.0, 0.0, 0.0), gradients(3))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_the_ranks_does_not_matter(order):
    given, weights = gradients(3), (5.0, 1.0, 2.0)
    make = CARRIERS["raw, gathered"]
    plain = reduced(make, weights, given)
    turned = reduced(make, [weights[r] for r in order], [given[r] for r in order])
    for key in SHAPES:
        torch.testing.assert_close(turned[key], plain[key], rtol=1e-6, atol=1e-7)


def test_one_message_with_the_plain_mean_and_eight_bytes_more_with_any_other():
    shapes = {"w": (1000,)}
    plain = gl.dry_run(gl.WeightedMean(1.0), shapes, world=4)
    assert (plain.collectives, plain.payload_bytes) == (1, 4004)
    carried = gl.dry_run(gl.WeightedMean(1.0, gl.Sharded(gl.Int8())), shapes, world=4)
    alone = gl.dry_run(gl.Sharded(gl.Int8()), shapes, world=4)
    assert carried.payload_bytes - alone.payload_bytes == 8
    cast = gl.dry_run(gl.Cast(gl.WeightedMean(1.0), torch.bfloat16), shapes, world=4)
    assert [event.payload_bytes for event in cast.events] == [8, 2000]


@pytest.mark.parametrize("lossy", [gl.Gathered(gl.TopK(0.2)), gl.Sharded(gl.Int4(block=32)), gl.PowerSGD(1)])
def test_with_feedback_inside_sent_and_residual_add_up_however_the_weights_change(lossy):
    """Sum over steps of the weighted means = what was applied + the mean of the residual."""
    weights = [[3.0, 1.0, 0.0, 9.0, 1.0], [1.0, 7.0, 2.0, 0.0, 1e3]]  # by rank, then step
    steps = itertools.count()

    def weigher(rank):
        return lambda bucket: weights[rank][bucket.step]

    inner = [gl.ErrorFeedback(copy.deepcopy(lossy)) for _ in range(2)]
    ranks = gl.Simulation([gl.WeightedMean(weigher(rank), inner[rank]) for rank in (0, 1)])
    wanted, applied = [], []
    for step in itertools.islice(steps, 5):
        given = gradients(2, step)
        wanted.append({key: exact(given, [own[step] for own in weights], key) for key in SHAPES})
        applied.append(ranks.step(given)[0])
    residual = [strategy.inner.memory.state_dict() for strategy in ranks.strategies]
    for key in SHAPES:
        arrived = sum(one[key].double() for one in applied) + sum(own[key].double() for own in residual) / 2
        torch.testing.assert_close(arrived, sum(one[key] for one in wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feedback", [gl.ErrorFeedback, gl.EF21])
def test_feedback_outside_is_refused_with_the_way_out(feedback):
    with pytest.raises(gl.InvalidValue, match=rf"put it inside: WeightedMean\(weight, {feedback.__name__}"):
        feedback(gl.Cast(gl.WeightedMean(1.0), torch.bfloat16))

    class Asks(gl.Strategy):
        async def reduce(self, bucket):
            from dataclasses import replace

            return await gl.WeightedMean(1.0).reduce(replace(bucket, feedback=Feedback(want_sent=True)))

    with pytest.raises(gl.InvalidValue, match="feedback outside of WeightedMean"):
        gl.Simulation(Asks(), world=2).step(gradients(2))


def test_what_is_no_mean_is_refused():
    with pytest.raises(gl.InvalidValue, match="the Sharded inside it takes another aggregate"):
        gl.WeightedMean(1.0, gl.After(3, gl.Sharded(gl.Raw(), lambda rows: rows[0])))
    for rule in (gl.Median(), gl.mean):
        with pytest.raises(gl.InvalidValue, match="Combined inside WeightedMean would leave ranks out"):
            gl.WeightedMean(1.0, gl.Combined(rule))
    with pytest.raises(gl.InvalidValue, match="multiply the weights"):
        gl.WeightedMean(1.0, gl.WeightedMean(2.0))
    with pytest.raises(gl.WrongType, match="wraps a strategy, got Int8"):
        gl.WeightedMean(1.0, gl.Int8())


@pytest.mark.parametrize("weight", ["3", True, None, [1.0]])
def test_weights_that_are_no_numbers_are_refused(weight):
    with pytest.raises(gl.WrongType, match=f"weight is a {type(weight).__name__}; give a number"):
        gl.WeightedMean(weight)
    ranks = gl.Simulation(gl.WeightedMean(lambda: weight), world=2)
    with pytest.raises(gl.WrongType, match=f"weight is a {type(weight).__name__}; give a number"):
        ranks.step(gradients(2))


@pytest.mark.parametrize("weight", [1e13, 1e-13, 3e38])
def test_weights_out_of_range_are_refused(weight):
    with pytest.raises(gl.InvalidValue, match="out of range; use 0, or from 1e-12 to 1e"):
        gl.WeightedMean(weight)


def by_bisection(weights, max_share):
    """The slow obvious one: lower the level until the largest share fits."""
    low, high = 0.0, max(weights)
    for _ in range(200):
        level = (low + high) / 2
        cut = [min(weight, level) for weight in weights]
        low, high = (level, high) if max(cut) <= max_share * sum(cut) else (low, level)
    cut = [min(weight, low) for weight in weights]
    return [weight / sum(cut) for weight in cut]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_share", [1.0, 0.7, 0.5, 0.35, 0.21])
def test_no_share_is_larger_than_max_share(seed, max_share):
    generator = torch.Generator().manual_seed(seed)
    weights = (10 ** torch.empty(5).uniform_(-3, 6, generator=generator)).tolist()
    found = shares(weights, max_share)
    assert math.fsum(found) == pytest.approx(1)
    assert max(found) <= max_share * (1 + 1e-12)
    assert found == pytest.approx(by_bisection(weights, max_share), rel=1e-6)
    kept = [(w, s) for w, s in zip(weights, found, strict=True) if s < max_share * (1 - 1e-9)]
    ratios = [share / weight for weight, share in kept]
    assert ratios == pytest.approx(ratios[:1] * len(ratios))  # who is not cut keeps its ratio to the others
    turned = shares(weights[::-1], max_share)
    assert turned == found[::-1]
    assert on_device(weights, max_share) == pytest.approx(found)


def test_shares_where_few_have_a_weight_or_all_the_same():
    assert shares([0.0, 2.0, 0.0, 6.0], 0.3) == [0.0, 0.5, 0.0, 0.5]  # two ranks cannot have 0.3 each
    assert shares([1e9, 1.0, 1.0], 1 / 3) == pytest.approx([1 / 3] * 3)
    assert shares([1e9, 1.0, 1.0, 0.0], 0.5) == pytest.approx([0.5, 0.25, 0.25, 0.0])
    assert shares([1.0, 1.0]) == [0.5, 0.5]


def test_a_rank_that_boasts_counts_for_the_most_and_no_more():
    given = [{"w": torch.tensor([value])} for value in (100.0, 1.0, 2.0)]
    answer = reduced(lambda w: gl.WeightedMean(w, max_share=0.5), (1e12, 4.0, 4.0), given)
    assert answer["w"].item() == pytest.approx(0.5 * 100 + 0.25 * 1 + 0.25 * 2)


def test_a_most_that_cannot_be_is_refused():
    for most in (0.0, -1.0, 1.1, math.nan, "0.5", True):
        with pytest.raises(gl.InvalidValue, match="above 0 and at most 1"):
            gl.WeightedMean(1.0, max_share=most)
    with pytest.raises(
        gl.InvalidValue, match=r"max_share=0.3 is not possible with 3 ranks.*use at least 1/3"
    ):
        reduced(lambda w: gl.WeightedMean(w, max_share=0.3), (1, 1, 1), gradients(3))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    ranks=st.integers(1, 9),
    max_share=st.sampled_from([1 / n for n in range(1, 10)] + [0.1 + 0.2, 0.35, 1 / 3 + 1e-10, 1 / 7 - 1e-8]),
    data=st.data(),
)
def test_no_share_is_larger_than_it_may_be(ranks, max_share, data):
    weight = st.sampled_from([0.0, 1e-12, 1e-6, 1.0, 1.0, 3.0, 1e12]) | st.floats(1e-12, 1e12)
    keeps_to_it([1.0, *(data.draw(weight) for _ in range(ranks - 1))], max_share)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 9])
def test_nor_beside_a_rank_of_next_to_no_weight(ranks):
    """n ranks that may have 1/n each, and one more: 1 - n / n was a divisor, where rounding let it be one."""
    chance = random.Random(ranks)
    for _ in range(3000):
        keeps_to_it([10 ** chance.uniform(0, 9) for _ in range(ranks)] + [1e-12], 1 / ranks)


def on_device(weights, max_share):
    return shares_on_device(torch.tensor(weights, dtype=torch.float64), max_share).tolist()


def keeps_to_it(weights, max_share):
    found = shares(weights, max_share)
    assert on_device(weights, max_share) == pytest.approx(found)
    assert sum(found) == pytest.approx(1)
    assert [share > 0 for share in found] == [weight > 0 for weight in weights]
    counted = sum(weight > 0 for weight in weights)
    assert max(found) <= max(max_share, 1 / counted) * (1 + 1e-6)
    ordered = sorted(zip(weights, found, strict=True))
    assert [share for _, share in ordered] == sorted(found)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("max_share", [1 / 3, 0.5, 1.0])
def test_a_largest_share_at_any_number_of_ranks(world, max_share):
    """One rank alone has all of it; too few are told before the first step."""
    strategies = [gl.WeightedMean(1e-12 if rank == 3 else 1.0, max_share=max_share) for rank in range(world)]
    if world > 1 and max_share * world < 1 - 1e-9:
        with pytest.raises(gl.InvalidValue, match=f"is not possible with {world} ranks"):
            gl.Simulation(strategies)
        return
    answer = gl.Simulation(strategies).step([{"w": torch.ones(3)}] * world)[0]["w"]
    torch.testing.assert_close(answer, torch.ones(3))
