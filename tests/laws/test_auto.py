"""Laws of ``Auto`` over every switch of its ladder, and what it refuses."""

import pickle
import random

import pytest
import torch

import gradlane as gl
from gradlane.strategies.auto.ladder import LADDER, LOSSES, loss_class, up_to

from ..support.grids import grid

SHAPES = {"a.weight": (16, 24), "a.bias": (16,), "b.weight": (24, 16), "none": (0, 3)}
WITH_FEEDBACK = [
    "ErrorFeedback(Sharded(Int4(block=32)))",
    "ErrorFeedback(Sharded(Sign(block=32)))",
    "ErrorFeedback(PowerSGD(1, min_compression_rate=1))",
    "ErrorFeedback(AcpSGD(1, min_compression_rate=1))",
    "ErrorFeedback(Gathered(TopK(0.1)))",
]
LOSING = ["Cast(Mean(), bfloat16)", "Sharded(Int8(block=32))"]


def gradients(world, step, outliers=True):
    generator = torch.Generator().manual_seed(step)
    found = [
        {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        for _ in range(world)
    ]
    if outliers:
        for own in found:
            own["a.weight"].view(-1)[::32] *= 30
    return found


def script(seed, strategies, steps):
    """Another strategy every one to four steps; every pair of them comes in some seed."""
    draw = random.Random(seed)
    found, step = {}, 0
    while step < steps:
        found[step] = draw.choice(strategies)
        step += draw.randint(1, 4)
    return found


@pytest.mark.parametrize(
    ("world", "seed", "bucket_bytes"),
    grid(
        [2, 3, 4, 8], range(3), [None, 512],
        quick=[(2, 0, 512), (3, 1, None), (3, 2, 512), (4, 0, None), (4, 1, 512), (8, 2, None)],
    ),
)  # fmt: skip
def test_nothing_is_lost_over_any_switch(world, seed, bucket_bytes):
    """What arrived + what all ranks keep = what was given."""
    replay = script(seed, ["Mean()", *WITH_FEEDBACK], 60)
    ranks = gl.Simulation(gl.Auto(among=WITH_FEEDBACK, replay=replay), world=world, bucket_bytes=bucket_bytes)
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    arrived = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(60):
        own = gradients(world, step)
        answer = ranks.step(own)[0]
        for name in SHAPES:
            given[name] += sum(grads[name].double() for grads in own)
            arrived[name] += answer[name].double() * world
    for name in SHAPES:
        kept = sum(s.feedback.memory.state_dict()[name].double() for s in ranks.strategies)
        torch.testing.assert_close(arrived[name] + kept, given[name], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_plain_mean_sends_the_residual_before_a_strategy_without_feedback_follows(world):
    lossy, narrow = WITH_FEEDBACK[0], LOSING[1]
    auto = gl.Auto(among=[lossy, narrow], replay={0: lossy, 3: narrow})
    ranks = gl.Simulation(auto, world=world)
    for step in range(3):
        ranks.step(gradients(world, step))
    kept = sum(s.feedback.memory.state_dict()["a.weight"] for s in ranks.strategies)
    own = gradients(world, 3)
    answer = ranks.step(own)[0]["a.weight"]
    exact = (sum(grads["a.weight"] for grads in own) + kept) / world
    torch.testing.assert_close(answer, exact, rtol=1e-5, atol=1e-4)
    for strategy in ranks.strategies:
        assert not any(value.any() for value in strategy.feedback.memory.state_dict().values())
    ranks.events.clear()
    ranks.step(gradients(world, 4))
    assert {event.kind for event in ranks.events} != {"all_reduce"}  # now the codec


@pytest.mark.parametrize("at", range(1, 12))
def test_a_resume_at_any_switch_equals_no_stop(at):
    replay = script(5, ["Mean()", *WITH_FEEDBACK, *LOSING], 12)
    make = lambda: gl.Simulation(gl.Auto(among=WITH_FEEDBACK + LOSING, replay=replay), world=3)  # noqa: E731
    whole, first, second = make(), make(), make()
    expected = [whole.step(gradients(3, step)) for step in range(12)][-1]
    for step in range(at):
        first.step(gradients(3, step))
    second.steps = at
    for old, new in zip(first.strategies, second.strategies, strict=True):
        new.load_state_dict(old.state_dict())
    answers = [second.step(gradients(3, step)) for step in range(at, 12)][-1]
    assert all(torch.equal(answers[0][name], expected[0][name]) for name in SHAPES)
    assert second.strategies[0].course.decisions == whole.strategies[0].course.decisions


def test_it_survives_pickling_with_its_decisions():
    ranks = gl.Simulation(gl.Auto(among=LOSING, replay={0: LOSING[0], 2: LOSING[1]}), world=2)
    for step in range(4):
        ranks.step(gradients(2, step))
    again = pickle.loads(pickle.dumps(ranks.strategies[0]))
    assert again.course.decisions == ranks.strategies[0].course.decisions
    assert again.course.now == LOSING[1]


def test_without_a_clock_it_is_the_plain_mean():
    cost, mean = (gl.dry_run(s, {"weight": (100, 100)}, world=4) for s in (gl.Auto("lossy"), gl.Mean()))
    assert cost.events == mean.events


@pytest.mark.parametrize("at_most", LOSSES)
def test_the_ladder_goes_from_exact_to_what_may_be_lost(at_most):
    texts = up_to(at_most)
    assert texts[0] == "Mean()"
    assert max(LOSSES.index(loss_class(text)) for text in texts) == LOSSES.index(at_most)
    assert [text for text in texts if text in LADDER] == [t for t in LADDER if t in texts]
    assert gl.Auto(at_most).allowed == texts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gl.Auto("int5"), "at_most='int5' is not known; use one of exact, bf16, int8, int4, lossy"),
        (lambda: gl.Auto(among=[]), "no list of strategies"),
        (lambda: gl.Auto(among="Mean()"), "no list of strategies"),
        (lambda: gl.Auto(among=["Noop()"]), "the ranks would get different gradients"),
        (lambda: gl.Auto(among=["EF21(Gathered(TopK()))"]), "EF21.own would keep what it holds"),
        (
            lambda: gl.Auto(among=["Hierarchical(ErrorFeedback(Sharded(Int4())))"]),
            "write ErrorFeedback outermost",
        ),
        (
            lambda: gl.Auto(among=["ErrorFeedback(PowerSGD(4))", "ErrorFeedback(Sharded(Int4()), bfloat16)"]),
            "write the same dtype and decay in all of them",
        ),
        (lambda: gl.Auto(replay={3: "Sharded(Int4())"}), "is not among"),
        (lambda: gl.Auto(replay={-1: "Mean()"}), "write a step from 0 up"),
        (lambda: gl.Auto(replay="Mean()"), "give a mapping from step to strategy"),
        (lambda: gl.ErrorFeedback(gl.Auto()), r"Auto decides for whole steps"),
        (lambda: gl.LocalSteps(gl.Auto()), r"Auto decides for whole steps"),
        (lambda: gl.Auto(among=["Private(Mean(), clip=1.0, noise_multiplier=1.0)"]), "Private"),
    ],
)
def test_what_it_refuses(make, message):
    with pytest.raises((gl.InvalidValue, gl.WrongType), match=message):
        make()
