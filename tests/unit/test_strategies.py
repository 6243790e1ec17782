"""What each strategy promises beyond the laws that all obey."""

import math

import pytest
import torch

import gradlane as gl
from gradlane.core.bucket import Feedback
from gradlane.kernels import native

from ..support.catalogue import MajorityVote


def simulate(strategy, *rows, **options):
    simulation = gl.Simulation(strategy, world=len(rows), **options)
    answers = simulation.step([{"a": torch.as_tensor(row, dtype=torch.float32)} for row in rows])
    return answers[0]["a"], simulation


def test_fp16_divides_before_it_narrows():
    mean, simulation = simulate(gl.Cast(gl.Mean(), torch.float16), [1e5], [0.0])
    assert mean.item() == pytest.approx(5e4, rel=1e-3)  # torch's fp16 hook makes inf of this
    assert simulation.figures == {"overflow": 0, "overflow_sum": 0, "underflow": 0}


def test_fp16_counts_what_it_loses():
    mean, simulation = simulate(
        gl.Cast(gl.Mean(), torch.float16), [3e5, 1e-9, -2e-9, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0]
    )
    assert math.isinf(mean[0])
    # The second rank looks at the sum only if no kernel has told it that its own part is small.
    sums = 1 if native.native() else 2
    assert simulation.figures == {"overflow": 1, "overflow_sum": sums, "underflow": 2}


def test_fp16_counts_sums_that_are_too_large():
    """Each part is within the limits of fp16, their sum is not."""
    mean, simulation = simulate(gl.Cast(gl.Mean(), torch.float16), [7e4, 1.0], [7e4, 1.0])
    assert math.isinf(mean[0])
    assert simulation.figures == {"overflow": 0, "overflow_sum": 2, "underflow": 0}


def test_a_non_finite_gradient_is_not_an_overflow():
    _, simulation = simulate(gl.Cast(gl.Mean(), torch.float16), [math.inf, math.nan, -math.inf], [0.0] * 3)
    assert simulation.figures["overflow"] == 0


def test_underflow_of_a_large_bucket_is_estimated():
    count = 1_000_000
    _, simulation = simulate(
        gl.Cast(gl.Mean(), torch.float16), torch.full((count,), 1e-9), torch.zeros(count)
    )
    assert simulation.figures["underflow"] == pytest.approx(count)


def test_cast_narrows_the_wire_and_not_the_strategy_inside():
    seen = []

    @gl.strategy_from
    async def inner(bucket):
        seen.append(bucket.flat.dtype)
        answer = await gl.all_reduce(bucket.flat)
        seen.append(answer.dtype)
        return answer

    _, simulation = simulate(gl.Cast(inner, torch.bfloat16), [1.0, 2.0], [3.0, 4.0])
    assert seen == [torch.float32] * 4
    assert [event.payload_bytes for event in simulation.events] == [4]


def test_cast_leaves_alone_what_is_narrow_already():
    trace = gl.dry_run(gl.Cast(MajorityVote(), torch.bfloat16), {"a": 100}, world=2)
    assert trace.payload_bytes == 200
    assert gl.dry_run(gl.Cast(gl.Mean(), torch.float32), {"a": 10}, world=2).payload_bytes == 40


def test_cast_of_a_cast_takes_the_narrowest():
    nested = gl.Cast(gl.Cast(gl.Mean(), torch.float32), torch.float16)
    assert gl.dry_run(nested, {"a": 10}, world=2, dtype=torch.float64).payload_bytes == 20


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.int8, gl.InvalidValue), (torch.float8_e5m2, gl.InvalidValue)]
)
def test_cast_refuses_what_cannot_be_summed(dtype, error):
    with pytest.raises(error, match=r"use one of torch\.float16"):
        gl.Cast(gl.Mean(), dtype)


def test_wrappers_refuse_what_is_no_strategy():
    with pytest.raises(gl.WrongType, match=r"write Cast\(Mean\(\), dtype\)"):
        gl.Cast(torch.float16, gl.Mean())
    with pytest.raises(gl.WrongType, match=r"then=.*Mean.* is not a strategy"):
        gl.After(3, gl.Mean)
    with pytest.raises(gl.WrongType, match="step is a float"):
        gl.After(0.1, gl.Mean())
    with pytest.raises(gl.WrongType, match="'a' leads to a str"):
        gl.Route({"a": "Mean()"})
    with pytest.raises(gl.WrongType, match="rules is a list"):
        gl.Route([("a", gl.Mean())])


def test_feedback_sees_what_a_cast_lost():
    bucket = gl.Bucket(
        torch.tensor([1.0001, -3.0]),
        (gl.Slot("a", torch.Size((2,))),),
        0,
        0,
        1,
        feedback=Feedback(want_sent=True),
    )
    gradient = bucket.flat.clone()
    running = gl.Cast(gl.Mean(), torch.bfloat16).reduce(bucket)
    request = running.send(None)
    while not hasattr(request, "payloads"):
        request = running.send(None)
    with pytest.raises(StopIteration) as end:
        running.send(request.payloads[0][0])
    assert torch.equal(end.value.value.sent(), gradient.bfloat16().float())


def test_weighted_mean_is_one_message_of_gradient_and_weight():
    mean, simulation = simulate([gl.WeightedMean(1.0), gl.WeightedMean(3)], [4.0, 0.0], [8.0, 4.0])
    assert mean.tolist() == [7.0, 3.0]
    assert [(e.kind, e.op, e.payload_elements) for e in simulation.events] == [("all_reduce", "sum", 3)]


def test_weight_is_asked_once_per_step():
    asked = []

    def tokens():
        asked.append(1)
        return len(asked)

    simulation = gl.Simulation([gl.WeightedMean(tokens)], bucket_bytes=8)
    gradients = [{name: torch.ones(2) for name in "abc"}]
    simulation.step(gradients)
    assert len(asked) == 1
    assert len(simulation.events) == 3
    simulation.step(gradients)
    assert len(asked) == 2


def test_a_rank_of_weight_zero_is_not_heard():
    mean, _ = simulate([gl.WeightedMean(0), gl.WeightedMean(2)], [math.nan], [5.0])
    assert mean.item() == 5


def test_weights_that_add_up_to_nothing_are_refused():
    with pytest.raises(gl.InvalidValue, match="weights of all 2 ranks add up to 0 in step 0"):
        simulate(gl.WeightedMean(0.0), [1.0], [2.0])


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_impossible_weights_are_refused(weight):
    with pytest.raises(gl.InvalidValue, match="finite and at least 0"):
        gl.WeightedMean(weight)
    with pytest.raises(gl.InvalidValue, match="finite and at least 0"):
        simulate(gl.WeightedMean(lambda: weight), [1.0], [2.0])


def test_weights_of_another_kind_are_refused():
    with pytest.raises(gl.WrongType, match="weight is a str"):
        gl.WeightedMean("three")
    with pytest.raises(gl.WrongType, match="weight takes 2 arguments"):
        gl.WeightedMean(lambda a, b: 1.0)


def test_weighted_mean_of_narrow_gradients_keeps_its_range():
    simulation = gl.Simulation(gl.WeightedMean(100_000.0), world=2)
    answers = simulation.step([{"a": torch.tensor([1.0], dtype=torch.float16)}] * 2)
    assert answers[0]["a"].item() == 1.0


def test_after_comes_back_to_the_first_in_the_steps_of_0_1_adam():
    wanted, step, number = [], 0, 0
    while step < 1000:  # the paper: k_{j+1} = k_j + 2^floor(j / 16)
        wanted.append(step)
        step, number = step + 2 ** (number // 16), number + 1
    after = gl.After(100, gl.Noop(), refresh=16)
    assert [s for s in range(1000) if after.is_first(s)] == sorted({*range(100), *wanted})
    assert not any(gl.After(100, gl.Noop()).is_first(s) for s in range(100, 1000))
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(gl.InvalidValue, match=f"refresh={wrong}"):
            gl.After(1, gl.Noop(), refresh=wrong)


def test_shared_momentum_is_the_momentum_of_the_mean():
    ranks = gl.Simulation(gl.SharedMomentum(gl.Mean(), {"a": 0.5, "*": 0.9}), world=3)
    m = {"a": torch.zeros(4), "b": torch.zeros(3)}
    for _ in range(5):
        given = [{"a": torch.randn(4), "b": torch.randn(3)} for _ in range(3)]
        answer = ranks.step(given)[0]
        for name, beta in (("a", 0.5), ("b", 0.9)):
            m[name] = beta * m[name] + (1 - beta) * torch.stack([own[name] for own in given]).mean(0)
            torch.testing.assert_close(answer[name], m[name])


def test_shared_momentum_forgets_nothing_for_an_answer_that_is_not_finite():
    ranks = gl.Simulation(gl.SharedMomentum(gl.Mean()), world=2)
    ranks.step([{"a": torch.ones(4)}] * 2)
    ranks.step([{"a": torch.full((4,), torch.inf)}, {"a": torch.ones(4)}])
    answer = ranks.step([{"a": torch.zeros(4)}] * 2)[0]["a"]
    torch.testing.assert_close(answer, torch.full((4,), 0.09))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: gl.ErrorFeedback(gl.SharedMomentum(gl.Mean())),
            r"put it inside: SharedMomentum\(ErrorFeedback",
        ),
        (lambda: gl.SharedMomentum(gl.WorkerMomentum(gl.Mean())), "momentum twice"),
        (lambda: gl.WorkerMomentum(gl.SharedMomentum(gl.Mean())), "momentum twice"),
        (lambda: gl.SharedMomentum(gl.SharedMomentum(gl.Mean())), "momentum twice"),
        (lambda: gl.SharedMomentum(gl.Mean(), 1.0), "beta=1.0 is not possible"),
        (lambda: gl.SharedMomentum(gl.Mean(), {"*": -1}), "beta=-1 is not possible"),
        (lambda: gl.SharedMomentum(gl.Mean(), {1: 0.5}), "beta has the key 1"),
        (lambda: gl.SharedMomentum(gl.Sign()), "SharedMomentum wraps a strategy, got Sign"),
    ],
)
def test_shared_momentum_refuses(make, words):
    with pytest.raises(gl.GradlaneError, match=words):
        make()


def test_a_parameter_without_a_beta_is_named():
    ranks = gl.Simulation(gl.SharedMomentum(gl.Mean(), {"a": 0.5}), world=2)
    with pytest.raises(gl.InvalidValue, match="matches 'b'; add"):
        ranks.step([{"b": torch.ones(2)}] * 2)


def test_after_changes_over_at_its_step():
    simulation = gl.Simulation(gl.After(2, then=gl.Noop()), world=2)
    gradients = [{"a": torch.tensor([1.0])}, {"a": torch.tensor([3.0])}]
    means = [simulation.step(gradients)[1]["a"].item() for _ in range(4)]
    assert means == [2, 2, 3, 3]


def test_route_sends_each_parameter_its_own_way():
    route = gl.Route({"*.bias": gl.Noop(), "b.*": MajorityVote(1.0)}, otherwise=gl.Mean())
    names = ("a.weight", "a.bias", "b.weight", "b.bias", "c.weight")
    simulation = gl.Simulation(route, world=2)
    answers = simulation.step(
        [{name: torch.tensor([2.0, -4.0]) * (rank + 1) for name in names} for rank in (0, 1)]
    )
    assert answers[1]["a.bias"].tolist() == answers[1]["b.bias"].tolist() == [4, -8]
    assert answers[1]["b.weight"].tolist() == [1, -1]
    assert answers[1]["a.weight"].tolist() == answers[1]["c.weight"].tolist() == [3, -6]


def test_route_knows_patterns_without_a_parameter():
    assert gl.Route({"embed.*": gl.Mean(), "*": gl.Mean()}).unmatched(("a.b",)) == ["embed.*"]


def test_strategy_from_takes_async_functions_only():
    with pytest.raises(gl.WrongType, match="write `async def f"):
        gl.strategy_from(lambda bucket: bucket.flat)


def test_state_of_strategies_inside():
    class Remembering(gl.Strategy):
        def __init__(self):
            self.memory = gl.Memory()

        async def reduce(self, bucket):
            return gl.Reduced(self.memory.like(bucket).add_(bucket.flat).clone())

    def build():
        return gl.After(
            1, then=gl.Route({"a": Remembering()}, otherwise=gl.Cast(Remembering(), torch.float16))
        )

    first = gl.Simulation([build()])
    for _ in range(3):
        first.step([{"a": torch.ones(1), "b": torch.ones(1)}])
    saved = first.strategies[0].state_dict()
    assert saved["then"]["rules[a]"]["memory"]["a"].item() == 2
    assert saved["then"]["otherwise"]["inner"]["memory"]["b"].item() == 2
    second = build()
    second.load_state_dict(saved)
    assert second.state_dict()["then"]["rules[a]"]["memory"]["a"].item() == 2
    with pytest.raises(gl.InvalidValue, match="After has no state called now; it has then, first"):
        second.load_state_dict({"now": {}})


def test_worker_momentum_is_the_optimizers_with_a_smaller_rate():
    simulation = gl.Simulation(gl.WorkerMomentum(gl.Mean(), beta=0.75), world=2)
    velocity = torch.zeros(5)
    for step in range(6):
        rows = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        answer = simulation.step([{"a": row} for row in rows])[0]["a"]
        velocity = 0.75 * velocity + rows.mean(0)
        torch.testing.assert_close(answer, velocity * 0.25)


def test_worker_momentum_sends_what_is_not_finite_and_forgets_it():
    simulation = gl.Simulation(gl.WorkerMomentum(gl.Combined(gl.Median()), beta=0.5), world=3)
    for step in range(3):
        bad = math.nan if step == 1 else 8.0
        answer = simulation.step([{"a": torch.tensor([bad])}, *[{"a": torch.tensor([8.0])}] * 2])[0]["a"]
        assert answer.item() == [4.0, 6.0, 7.0][step]
    assert simulation.strategies[0].state_dict()["memory"]["a"].item() == 6.0
    assert simulation.figures["rank0_excluded"] == 3


@pytest.mark.parametrize("beta", [-0.1, 1.0, math.nan])
def test_worker_momentum_refuses_what_would_not_forget(beta):
    with pytest.raises(gl.InvalidValue, match="use a number from 0 to below 1"):
        gl.WorkerMomentum(gl.Mean(), beta)
    with pytest.raises(gl.WrongType, match="WorkerMomentum wraps a strategy, got Median"):
        gl.WorkerMomentum(gl.Median())
