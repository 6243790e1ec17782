"""Nesterov is DiLoCo's outer step, whatever is inside, and its velocity is the same on all ranks."""

import math

import pytest
import torch

import gradlane as gl
from gradlane.core.strategy import is_undoable, named_states

from ..reference.outer import diloco
from ..support.catalogue import weight_of_rank

NUMEL = 60


def rounds(world, count=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(world)
    return [[torch.randn(NUMEL, generator=generator).to(dtype) for _ in range(world)] for _ in range(count)]


def answers(strategy, given):
    ranks = gl.Simulation(strategy, world=len(given[0]))
    return [ranks.step([{"w": own.clone()} for own in rows])[0]["w"] for rows in given]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.5), (0.7, 0.9), (1.0, 0.0), (3.0, 0.99)])
def test_it_is_the_outer_step_of_diloco(world, lr, momentum):
    given = rounds(world)
    expected = diloco([[own.numpy() for own in rows] for rows in given], lr, momentum)
    for found, wanted in zip(answers(gl.Nesterov(gl.Mean(), lr, momentum), given), expected, strict=True):
        torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)


def test_it_moves_weights_as_torchs_sgd_does():
    given = rounds(3)
    weights, own = torch.zeros(NUMEL), torch.zeros(NUMEL)
    outer = torch.optim.SGD([weights], lr=0.7, momentum=0.5, nesterov=True)
    for rows, answer in zip(given, answers(gl.Nesterov(), given), strict=True):
        weights.grad = torch.stack(rows).mean(0)
        outer.step()
        torch.testing.assert_close(own.sub_(answer), weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "inner",
    [
        lambda: gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))),
        lambda: gl.Combined(gl.Median()),
        lambda: gl.WeightedMean(weight_of_rank),
        lambda: gl.After(2, gl.Cast(gl.Mean(), torch.bfloat16)),
        lambda: gl.EF21(gl.Gathered(gl.TopK(0.2))),
    ],
)
def test_the_answer_inside_is_what_moves(inner, world):
    given = rounds(world)
    inside = [[answer.numpy()] for answer in answers(inner(), given)]
    for found, wanted in zip(answers(gl.Nesterov(inner()), given), diloco(inside, 0.7, 0.5), strict=True):
        torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("outside", "inside"),
    [
        (
            lambda: gl.WeightedMean(weight_of_rank, gl.Nesterov()),
            lambda: gl.Nesterov(gl.WeightedMean(weight_of_rank)),
        ),
        (
            lambda: gl.WorkerMomentum(gl.Nesterov(gl.Combined(gl.Median()))),
            lambda: gl.Nesterov(gl.WorkerMomentum(gl.Combined(gl.Median()))),
        ),
        (
            lambda: gl.Private(gl.Nesterov(), clip=1.0, noise_multiplier=0.0),
            lambda: gl.Nesterov(gl.Private(gl.Mean(), clip=1.0, noise_multiplier=0.0)),
        ),
    ],
)
def test_what_changes_a_ranks_gradient_may_be_on_either_side(outside, inside, world):
    given = rounds(world)
    for one, other in zip(answers(outside(), given), answers(inside(), given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_other_widths_are_computed_in_fp32_or_wider(dtype, momentum):
    """Each answer is rounded once: the velocity never is."""
    given = rounds(1, count=30, dtype=dtype)
    expected = diloco([[own.double().numpy() for own in rows] for rows in given], 0.7, momentum)
    unit = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-14
    for found, wanted in zip(answers(gl.Nesterov(lr=0.7, momentum=momentum), given), expected, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=unit, atol=1e-5 * unit**0.5)


def velocities(ranks):
    return [strategy.velocity.state_dict() for strategy in ranks.strategies]


def test_the_velocity_is_shared_and_without_momentum_there_is_none():
    ranks = gl.Simulation(gl.Nesterov(), world=3)
    for rows in rounds(3):
        ranks.step([{"w": own} for own in rows])
    first, *others = velocities(ranks)
    assert first["w"].dtype == torch.float32
    assert all(torch.equal(first["w"], own["w"]) for own in others)
    assert ranks.strategies[0].velocity.shared
    plain = gl.Simulation(gl.Nesterov(momentum=0.0), world=3)
    plain.step([{"w": own} for own in rounds(3)[0]])
    assert all(strategy.state_dict() == {} for strategy in plain.strategies)


@pytest.mark.parametrize("world", [1, 5])
def test_any_number_of_ranks_goes_on_with_the_velocity(world):
    old, new = gl.Simulation(gl.Nesterov(), world=3), gl.Simulation(gl.Nesterov(), world=world)
    for rows in rounds(3):
        old.step([{"w": own} for own in rows])
    saved = [strategy.state_dict() for strategy in old.strategies]
    for rank, strategy in enumerate(new.strategies):
        strategy.load_state_dict(strategy.carried(saved, rank, world))
    nothing = {"w": torch.zeros(NUMEL)}  # then the answer is the velocity's part
    answer = new.step([nothing] * world)[0]["w"]
    assert answer.count_nonzero() == NUMEL
    assert torch.equal(answer, old.step([nothing] * 3)[0]["w"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("momentum", [0.5, 0.0])
def test_a_bad_number_is_answered_and_not_remembered(bad, momentum):
    given = rounds(2)
    ranks, quiet = (gl.Simulation(gl.Nesterov(momentum=momentum), world=2) for _ in range(2))
    for number, rows in enumerate(given):
        if number == 3:
            broken = [{"w": own.clone()} for own in rows]
            broken[1]["w"][7] = bad
            assert not ranks.step(broken)[0]["w"].isfinite().all()
        found, expected = (some.step([{"w": own} for own in rows])[0]["w"] for some in (ranks, quiet))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_overflow_of_its_own_is_not_remembered(dtype):
    """Each delta is finite, and the answer is not: at the next step all is as before."""
    largest = torch.full((NUMEL,), torch.finfo(dtype).max, dtype=dtype)
    ranks = gl.Simulation(gl.Nesterov(lr=1.0, momentum=0.9), world=1)
    assert not ranks.step([{"w": largest}])[0]["w"].isfinite().all()
    assert velocities(ranks)[0]["w"].count_nonzero() == 0
    assert ranks.step([{"w": largest * 0 + 1}])[0]["w"].isfinite().all()


@pytest.mark.parametrize("momentum", [0.5, 0.0])
def test_an_overflow_after_a_bounded_mean_is_not_taken_for_bounded(momentum):
    """A driver believes the very tensor that was a bounded mean; so the answer must be another one."""
    bucket = gl.Bucket(torch.full((3,), 1e10), (gl.Slot("w", torch.Size([3])),), step=0, rank=0, world=1)
    coroutine = gl.Nesterov(lr=1e30, momentum=momentum).reduce(bucket)
    coroutine.send(None)
    with pytest.raises(StopIteration) as end:
        coroutine.send(bucket.flat)
    reduced = end.value.value
    assert reduced.mean.isinf().all()
    assert reduced.mean is not bucket.flat
    assert not reduced.bounded


@pytest.mark.parametrize("nonfinite", [False, True])
def test_a_step_that_is_undone_leaves_the_velocity(nonfinite):
    ranks = gl.Simulation(gl.Nesterov(), world=2)
    states = [leaf.state for own in ranks.strategies for leaf in named_states(own) if is_undoable(leaf.state)]
    assert len(states) == 2
    for state in states:
        state.undoable = True
    first, second, *_ = rounds(2)
    ranks.step([{"w": own} for own in first])
    for state in states:
        state.keep()
    before = velocities(ranks)
    ranks.step([{"w": own * (torch.nan if nonfinite else 1)} for own in second])
    for state in states:
        state.undo()
    assert all(torch.equal(now["w"], then["w"]) for now, then in zip(velocities(ranks), before, strict=True))


REFUSED = [
    (lambda: gl.Nesterov(gl.Noop()), gl.InvalidValue, r"Nesterov\(... Noop\(\) ...\): each rank would have"),
    (lambda: gl.Nesterov(gl.Route({"a": gl.Noop()})), gl.InvalidValue, "another velocity"),
    (lambda: gl.Nesterov(gl.After(3, gl.Mean(), first=gl.Noop())), gl.InvalidValue, "another velocity"),
    (lambda: gl.Nesterov(gl.After(3, gl.Nesterov())), gl.InvalidValue, "two velocities, .* use one"),
    (
        lambda: gl.ErrorFeedback(gl.Nesterov(gl.Sharded(gl.Int4()))),
        gl.InvalidValue,
        r"put it inside: Nesterov\(ErrorFeedback\(...\)\)",
    ),
    (
        lambda: gl.EF21(gl.Route({"a": gl.Nesterov()})),
        gl.InvalidValue,
        r"put it inside: Nesterov\(EF21\(...\)\)",
    ),
    (
        lambda: gl.Cast(gl.Nesterov(gl.Sharded(gl.Int8())), torch.bfloat16),
        gl.InvalidValue,
        "Cast would narrow",
    ),
    (lambda: gl.Private(gl.Nesterov(gl.Combined(gl.Median())), 1.0, 1.0), gl.InvalidValue, "cannot hold"),
    (
        lambda: gl.Nesterov(gl.After(3, gl.Private(gl.Mean(), 1.0, 1.0))),
        gl.InvalidValue,
        "but for Cast and Nesterov",
    ),
    (lambda: gl.Nesterov(gl.Int8()), gl.WrongType, r"wraps a strategy, got Int8; write Nesterov\(Mean\(\)\)"),
    (lambda: gl.Nesterov(lr=0.0), gl.InvalidValue, "lr=0.0; use a number above 0"),
    (lambda: gl.Nesterov(lr=math.inf), gl.InvalidValue, "lr=inf"),
    (lambda: gl.Nesterov(lr="1"), gl.InvalidValue, "lr='1'"),
    (lambda: gl.Nesterov(momentum=1.0), gl.InvalidValue, "momentum=1.0; use a number from 0 to below 1"),
    (lambda: gl.Nesterov(momentum=-0.1), gl.InvalidValue, "momentum=-0.1"),
    (lambda: gl.Nesterov(momentum=True), gl.InvalidValue, "momentum=True"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_makes_no_sense_is_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_sparse_gradients_are_refused():
    rows = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (5, 4), check_invariants=True)
    with pytest.raises(gl.WrongType, match="Nesterov cannot encode the sparse gradient of 'table'"):
        gl.Simulation(gl.Nesterov(), world=2).step([{"table": rows}] * 2)


def test_the_text_form():
    text = "Nesterov(ErrorFeedback(Sharded(Int4())), lr=1.0, momentum=0.9)"
    assert gl.parse(text) == gl.Nesterov(gl.ErrorFeedback(gl.Sharded(gl.Int4())), 1.0, 0.9)
    assert gl.describe(gl.Nesterov()) == "Nesterov(inner=Mean(), lr=0.7, momentum=0.5)"
    assert gl.describe(gl.Nesterov(), short=True) == "Nesterov()"
