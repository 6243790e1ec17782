"""What every rule over ranks obeys."""

import math

import pytest
import torch

import gradlane as gl

from ..reference.aggregate import smallest_sum_of_distances
from ..support.rules import BY_ELEMENT, CERTAIN, ORDERLY, ROBUST, RULES

SHAPES = {"a": (40, 5), "b": (33,), "none": (0,), "c": (3, 7, 2)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())
every = pytest.mark.parametrize("name", RULES)


def normal(world, seed=0, scale=1.0):
    return scale * torch.randn(world, NUMEL, generator=torch.Generator().manual_seed(seed))


def nearly_equal(world, seed=0):
    """A large part in common, and 1e-6 of it on top: fp32 has seven digits."""
    common = 1 + normal(1, seed=99).abs()
    return common + 1e-6 * normal(world, seed)


def of_one_kind(world, seed=0):
    """As gradients are: something in common, and noise of the same size."""
    return normal(1, seed=98) + normal(world, seed)


def as_gradients(row):
    answer, start = {}, 0
    for name, shape in SHAPES.items():
        answer[name] = row[start : start + math.prod(shape)].view(shape)
        start += math.prod(shape)
    return answer


def combined(rule, rows, bucket_bytes=None, codec=None):
    strategy = gl.Combined(rule, codec or gl.Raw())
    simulation = gl.Simulation(strategy, world=len(rows), bucket_bytes=bucket_bytes)
    answers = simulation.step([as_gradients(row) for row in rows])
    return torch.cat([answers[0][name].reshape(-1) for name in SHAPES])


@pytest.mark.parametrize("name", CERTAIN)
@pytest.mark.parametrize("bucket_bytes", [None, 200])
@pytest.mark.parametrize("make", [normal, of_one_kind, nearly_equal])
def test_it_is_the_slow_one_whatever_the_buckets(name, make, bucket_bytes):
    known = RULES[name]
    for seed in range(3):
        rows = make(known.world, seed)
        found = combined(known.rule, rows, bucket_bytes)
        exact = known.reference(rows.double())
        apart = (rows.double() - rows.double().mean(0)).norm(dim=1).median()
        rounding = 1e-6 * exact.norm() / math.sqrt(len(exact))  # of fp32, in each element
        assert (found - exact).abs().max() <= rounding + 1e-4 * apart / math.sqrt(len(exact))


@pytest.mark.parametrize("name", ORDERLY)
def test_the_order_of_ranks_changes_nothing(name):
    known = RULES[name]
    for seed in range(3):
        rows = of_one_kind(known.world, seed)
        order = torch.randperm(known.world, generator=torch.Generator().manual_seed(seed))
        first, second = combined(known.rule, rows), combined(known.rule, rows[order])
        if name in BY_ELEMENT:
            assert torch.equal(first, second)
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("size", [10.0, 1e4, 1e20, 1e37])
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_wrong_ranks_of_any_size_move_it_boundedly(name, size, together):
    known = RULES[name]
    rows = of_one_kind(known.world)
    honest = rows[known.wrong :]
    limit = 4 * (honest - honest.mean(0)).norm(dim=1).max()
    rows[: known.wrong] = normal(1 if together else known.wrong, seed=7, scale=size)
    assert (combined(known.rule, rows) - honest.mean(0)).norm() < limit


def test_the_mean_and_adasum_are_moved_without_bound():
    rows = of_one_kind(5)
    rows[0] = normal(1, seed=7, scale=1e20)
    assert combined(gl.mean, rows).norm() > 1e18
    assert combined(gl.AdaSum(), rows).norm() > 1e18


def test_whole_vectors_are_judged_over_all_buckets():
    """Each bucket by itself would choose another rank."""
    rows = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    ranks = gl.Simulation(gl.Combined(gl.Krum(1)), world=5, bucket_bytes=4)
    answers = ranks.step([{name: row[i : i + 1] for i, name in enumerate("xyz")} for row in rows])
    whole = torch.cat(list(answers[0].values()))
    assert any(torch.equal(whole, row) for row in rows)
    assert sum(event.kind == "all_reduce" for event in ranks.events) == 3


def test_the_geometric_median_has_the_smallest_sum_of_distances():
    for seed in range(3):
        rows = of_one_kind(6, seed)
        rows[0] *= 50
        assert smallest_sum_of_distances(rows.double(), combined(gl.GeometricMedian(), rows).double())


def test_adasum_adds_orthogonal_gradients_and_averages_equal_ones():
    orthogonal = torch.zeros(4, NUMEL)
    for rank in range(4):
        orthogonal[rank, rank::4] = normal(1, rank)[0, rank::4]
    torch.testing.assert_close(combined(gl.AdaSum(), orthogonal), orthogonal.sum(0))
    equal = normal(1).expand(4, NUMEL)
    torch.testing.assert_close(combined(gl.AdaSum(), equal), equal[0])
    zeros = torch.zeros(3, NUMEL)
    zeros[1] = equal[0]
    torch.testing.assert_close(combined(gl.AdaSum(), zeros), equal[0])


@every
def test_equal_gradients_are_the_answer(name):
    rows = normal(1).expand(RULES[name].world, NUMEL)
    torch.testing.assert_close(combined(RULES[name].rule, rows), rows[0], rtol=1e-6, atol=0)


@every
def test_replicas_traces_and_texts(name):
    known = RULES[name]
    for codec in (gl.Raw(), gl.Int8(block=32)):
        strategy = gl.Combined(known.rule, codec)
        assert gl.parse(gl.describe(strategy)) == strategy
        ranks = gl.Simulation(strategy, world=known.world, bucket_bytes=200)
        answers = ranks.step([as_gradients(row) for row in of_one_kind(known.world)])
        assert all(torch.equal(answer[key], answers[0][key]) for answer in answers for key in SHAPES)
        trace = gl.dry_run(strategy, SHAPES, world=known.world, bucket_bytes=200)
        assert list(trace.events) == ranks.events


@pytest.mark.parametrize(
    ("rule", "world", "message"),
    [
        (gl.TrimmedMean(2), 4, "trim=2 leaves nothing of 4 ranks; use trim < 2"),
        (gl.Krum(1), 4, "Krum f=1 needs 5 ranks, and there are 4; use f=0 at most, or another rule"),
        (gl.Krum(0), 2, "Krum f=0 needs 3 ranks, and there are 2; use another rule"),
        (gl.Bulyan(1), 6, "Bulyan f=1 needs 7 ranks, and there are 6; use f=0 at most"),
        (gl.MultiKrum(2), 4, r"MultiKrum f=2 is not a minority of 4 ranks; use f < 2, or at least 5 ranks"),
        (gl.MultiKrum(1, m=4), 4, r"m=4 is more than f=1 leaves of 4 ranks; use m <= 3"),
        (gl.NNM(2, then=gl.Median()), 4, "NNM f=2 is not a minority of 4 ranks"),
        (gl.NNM(1, then=gl.Krum(1)), 4, "Krum f=1 needs 5 ranks"),
        (gl.NearMedian(5), 4, "keep=5 is more than 4 ranks; use 4 or less"),
    ],
    ids=str,
)
def test_too_few_ranks_are_refused_before_anything_is_sent(rule, world, message):
    with pytest.raises(gl.InvalidValue, match=message):
        gl.Simulation(gl.Combined(rule), world=world)
    with pytest.raises(gl.InvalidValue, match=message):
        gl.dry_run(gl.Combined(rule), {"w": (8,)}, world=world)
    if isinstance(rule, gl.RowRule):
        with pytest.raises(gl.InvalidValue, match=message):
            gl.dry_run(gl.Sharded(gl.Raw(), rule), {"w": (8,)}, world=world)
    alone = gl.Simulation(gl.Combined(rule), world=1).step([{"w": torch.arange(8.0)}])
    assert alone[0]["w"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gl.Sharded(gl.Raw(), gl.Krum(1)), gl.WrongType, r"write Combined\(Krum\(f=1\)\)"),
        (lambda: gl.Gathered(gl.Raw(), gl.AdaSum()), gl.WrongType, r"write Combined\(AdaSum\(\)\)"),
        (lambda: gl.Krum(-1), gl.InvalidValue, "Krum f=-1 is not possible; use 0 or more"),
        (lambda: gl.TrimmedMean(0.1), gl.WrongType, "trim is a float; give a whole number"),
        (lambda: gl.TrimmedMean(True), gl.WrongType, "trim is a bool"),
        (lambda: gl.MultiKrum(1, m=0), gl.InvalidValue, "m=0 is not possible; use 1 or more"),
        (lambda: gl.NNM(1, then=gl.Median), gl.WrongType, r"then=Median is not a rule; write NNM\(1, then="),
        (lambda: gl.NNM(1, then=gl.mean), gl.WrongType, "then=function is not a rule"),
        (lambda: gl.CenteredClipping(0.0), gl.InvalidValue, "tau=0.0 is not possible"),
        (lambda: gl.CenteredClipping("1"), gl.WrongType, "tau is a str"),
        (lambda: gl.GeometricMedian(smoothing=0), gl.InvalidValue, "smoothing=0 is not possible"),
        (lambda: gl.GeometricMedian(smoothing="x"), gl.InvalidValue, "smoothing='x' is not possible"),
        (
            lambda: gl.GeometricMedian(iterations="3"),
            gl.WrongType,
            "iterations is a str; give a whole",
        ),
        (lambda: gl.Watch(factor="x"), gl.InvalidValue, "factor='x' would name honest ranks"),
        (lambda: gl.Watch(patience=1.5), gl.WrongType, "patience is a float; give a whole number"),
        (lambda: gl.Combined(gl.Median), gl.WrongType, "got the class Median"),
        (lambda: gl.Combined(gl.Int8()), gl.WrongType, "cannot be called"),
        (
            lambda: gl.Combined(gl.Median(), gl.Mean()),
            gl.WrongType,
            "Combined takes a codec, and Mean is a st",
        ),
        (lambda: gl.Combined(gl.Median(), watch=3), gl.WrongType, "watch is a int"),
        (lambda: gl.Watch(factor=1.0), gl.InvalidValue, "factor=1.0 would name honest ranks"),
        (lambda: gl.Watch(patience=0), gl.InvalidValue, "patience=0 is not possible"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_written(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("rule", [gl.Median(), gl.Krum(0), gl.NNM(0, then=gl.TrimmedMean(0))], ids=str)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_it_costs_a_plain_all_reduce_and_the_inner_products(rule, world):
    if isinstance(rule, gl.Krum) and world == 2:
        rule = gl.MultiKrum(0)
    shapes = {"w": (1000, 1000), "b": (1003,)}
    plain = gl.dry_run(gl.Mean(), shapes, world=world)
    robust = gl.dry_run(gl.Combined(rule), shapes, world=world)
    inner_products = 2 * (world - 1) / world * 8 * world**2
    assert robust.wire_bytes <= 1.02 * plain.wire_bytes + inner_products
    assert robust.wire_bytes >= plain.wire_bytes


def test_a_narrow_codec_narrows_gradients_and_not_inner_products():
    narrow = gl.dry_run(gl.Combined(gl.Krum(1), gl.Raw("bfloat16")), {"w": (5000,)}, world=5)
    assert [event.payload_bytes for event in narrow.events] == [2 * 5000, 8 * 5 * 6, 2 * 1000]
    rows = nearly_equal(5)
    rows[0] *= 3
    ranks = gl.Simulation(gl.Combined(gl.Krum(1), gl.Raw("bfloat16")), world=5)
    answer = ranks.step([as_gradients(row) for row in rows])[0]
    torch.testing.assert_close(answer["b"], rows[1, 200:233], rtol=1e-2, atol=0)


@pytest.mark.parametrize("bucket_bytes", [None, 16, 8])
def test_one_rule_for_whole_vectors_sees_all_that_is_routed_to_it(bucket_bytes):
    """Whatever shares a bucket: several patterns that lead to it are no reason to decide in parts."""
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    same = gl.Combined(gl.Krum(1))
    route = gl.Route({"a": same, "b": gl.Mean(), "c": same}, otherwise=same)
    ranks = gl.Simulation(route, world=5, bucket_bytes=bucket_bytes)
    answer = ranks.step([{name: row[2 * i : 2 * i + 2] for i, name in enumerate("abcd")} for row in rows])[0]
    judged = rows[:, [0, 1, 4, 5, 6, 7]]
    found = torch.cat([answer[name] for name in "acd"])
    assert torch.equal(found, combined_rows(gl.Krum(1), judged))
    torch.testing.assert_close(answer["b"], rows[:, 2:4].mean(0))


def combined_rows(rule, rows):
    return gl.Simulation(gl.Combined(rule), world=len(rows)).step([{"w": row} for row in rows])[0]["w"]


def test_two_rules_for_whole_vectors_do_not_mix():
    route = gl.Route({"a": gl.Combined(gl.Krum(1))}, otherwise=gl.Combined(gl.Krum(1)))
    ranks = gl.Simulation(route, world=5, bucket_bytes=200)
    with pytest.raises(gl.InvalidValue, match="two strategies with a step_sum of their own meet in one step"):
        ranks.step([as_gradients(row) for row in normal(5)])
