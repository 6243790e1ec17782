"""Ranks that are wrong are left out, named, and shown in the metrics."""

import logging
import math

import pytest
import torch

import gradlane as gl
from gradlane.core.collectives import Request, StepSum
from gradlane.core.running import Running, step_total
from gradlane.simulate.answers import exchange

RULES = [gl.Median(), gl.TrimmedMean(1), gl.Krum(1), gl.NNM(1, then=gl.TrimmedMean(1)), gl.mean]
both_kinds = pytest.mark.parametrize("rule", [gl.Median(), gl.GeometricMedian()], ids=str)


def gradients(world, seed=0):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(60, generator=generator)
    return [
        {"a": common[:40] + torch.randn(40, generator=generator), "b": common[40:].clone()}
        for _ in range(world)
    ]


def whole(answer):
    return torch.cat(list(answer.values()))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", [gl.Raw(), gl.Int8(block=32)], ids=str)
def test_who_is_not_finite_is_not_heard_and_the_rule_expects_one_less(rule, bad, codec, caplog):
    given = gradients(6)
    given[4]["a"][7] = bad
    ranks = gl.Simulation(gl.Combined(rule, codec), world=6)
    with caplog.at_level(logging.WARNING, "gradlane"):
        answer = whole(ranks.step(given)[0])
    fewer = rule.without(1) if isinstance(rule, gl.Rule) else rule
    others = gl.Simulation(gl.Combined(fewer, codec), world=5).step(given[:4] + given[5:])[0]
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if codec == gl.Raw() else {"rtol": 0, "atol": 0.1}
    torch.testing.assert_close(answer, whole(others), **tolerance)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["rank 4 sent values that are not finite in step 0 and is left out"] * 2  # ranks 0 and 4
    assert ranks.figures["rank4_excluded"] == 6  # each rank's own count


def test_whole_vectors_are_left_out_of_all_buckets_and_elements_of_one():
    """Rules for whole vectors drop the rank for the step; others decide bucket by bucket."""
    given = [{"a": torch.full((8,), float(rank)), "b": torch.full((8,), float(rank))} for rank in range(5)]
    given[4]["a"][0] = math.nan
    means = {}
    for rule in (gl.mean, gl.MultiKrum(0)):
        answer = gl.Simulation(gl.Combined(rule), world=5, bucket_bytes=32).step(given)[0]
        means[rule] = (answer["a"][0].item(), answer["b"][0].item())
    assert means[gl.mean] == (1.5, 2.0)
    assert means[gl.MultiKrum(0)] == (1.5, 1.5)


def test_too_few_that_are_left_are_refused_by_name():
    given = gradients(5)
    for rank in (1, 2, 3):
        given[rank]["a"][rank] = math.nan
    told = (
        "step 0: ranks 1, 2, 3 sent values that are not finite; 2 of 5 ranks are left, which is too few: Krum"
    )
    with pytest.raises(gl.InvalidValue, match=f"{told} f=0 needs 3 ranks, and there are 2"):
        gl.Simulation(gl.Combined(gl.Krum(1)), world=5).step(given)


@both_kinds
def test_where_nobody_is_finite_the_answer_is_not(rule, caplog):
    """As a mean would be: a gradient scaler waits for that."""
    given = [{"a": torch.full((8,), math.inf)} for _ in range(3)]
    with caplog.at_level(logging.WARNING, "gradlane"):
        assert not gl.Simulation(gl.Combined(rule), world=3).step(given)[0]["a"].isfinite().any()
    assert not caplog.records  # nobody is to blame
    alone = gl.Simulation(gl.Combined(rule), world=1).step([{"a": torch.tensor([1.0, math.inf])}])
    assert alone[0]["a"].tolist() == [1.0, math.inf]


@both_kinds
def test_who_has_joined_is_not_counted(rule):
    layout = (gl.Slot("w", torch.Size([8])),)
    values = (1.0, 2.0, 3.0, 0.0, 0.0)
    ranks = [
        Running(
            gl.Combined(rule),
            gl.Bucket(torch.full((8,), value), layout, 0, rank, 5, joined=rank > 2),
            lambda bucket, note: None,
        )
        for rank, value in enumerate(values)
    ]
    answers = [None] * 5
    while not isinstance(ranks[0].state, gl.Reduced):
        states = [rank.resume(answer) for rank, answer in zip(ranks, answers, strict=True)]
        if isinstance(states[0], Request):
            answers = exchange(states, [rank.bucket for rank in ranks])
        elif isinstance(states[0], StepSum):
            answers = [step_total([rank]) for rank in ranks]
    for rank in ranks:
        torch.testing.assert_close(rank.state.mean, torch.full((8,), 2.0))


def test_metrics_show_distances_and_weights():
    given = gradients(5)
    given[2]["a"] += 100
    for rule in (gl.Median(), gl.Krum(1)):
        ranks = gl.Simulation(gl.Combined(rule), world=5)
        ranks.step(given)
        far = [ranks.figures[f"rank{rank}_distance_square"] / 5 for rank in range(5)]
        expected = sorted(float((given[2]["a"] - other["a"]).norm() ** 2) for other in given)[2]
        assert far[2] == pytest.approx(expected, rel=1e-5)
        assert max(far[:2] + far[3:]) < far[2] / 100
    weights = [ranks.figures[f"rank{rank}_weight"] / 5 for rank in range(5)]
    assert sorted(weights) == [0, 0, 0, 0, 1]
    assert weights[2] == 0


def watched(rule, wrong, steps, watch=None, caplog=None, world=5, bucket_bytes=None):
    """Train for some steps with ``wrong(step, gradients)`` changing them; what was logged."""
    strategy = gl.Combined(rule, watch=watch or gl.Watch(patience=4))
    ranks = gl.Simulation(strategy, world=world, bucket_bytes=bucket_bytes)
    with caplog.at_level(logging.WARNING, "gradlane"):
        for step in range(steps):
            given = gradients(world, step)
            wrong(step, given)
            ranks.step(given)
    return [record.getMessage() for record in caplog.records], ranks


@both_kinds
@pytest.mark.parametrize("bucket_bytes", [None, 160])
def test_who_stays_far_is_named_with_the_step_it_began_and_when_it_is_back(rule, bucket_bytes, caplog):
    def wrong(step, given):
        if 3 <= step < 12:
            given[2]["a"] *= 20

    told, _ = watched(rule, wrong, 15, caplog=caplog, bucket_bytes=bucket_bytes)
    assert len(told) == 4  # two stories, by rank 0 and by rank 2 itself
    assert told[0].startswith("rank 2 has been an outlier since step 3 (its gradient is ")
    assert told[0].endswith(" times as far from the others as they are from each other)")
    assert float(told[0].split("gradient is ")[1].split()[0]) > 10
    assert told[2] == "rank 2 is back among the others since step 12"


@both_kinds
@pytest.mark.parametrize("bucket_bytes", [None, 160])
def test_who_is_not_finite_is_named_once_for_each_time_it_begins(rule, bucket_bytes, caplog):
    def wrong(step, given):
        if 2 <= step < 6 or step == 9:
            given[3]["a"][0] = given[3]["b"][0] = math.nan

    told, _ = watched(rule, wrong, 12, caplog=caplog, bucket_bytes=bucket_bytes)
    assert told == [  # each by ranks 0 and 3
        f"rank 3 sent values that are not finite in step {step} and is left out" for step in (2, 2, 9, 9)
    ]


def test_a_short_episode_is_not_named(caplog):
    def wrong(step, given):
        if step % 4 != 3:
            given[1]["a"] *= 20

    assert watched(gl.Median(), wrong, 16, caplog=caplog)[0] == []


def test_zeros_are_named_though_they_are_near(caplog):
    def wrong(step, given):
        given[0] = {name: torch.zeros_like(part) for name, part in given[0].items()}

    told, _ = watched(gl.Median(), wrong, 8, caplog=caplog)
    assert told == ["rank 0 has been an outlier since step 0 (it sends next to nothing)"]


def test_honest_ranks_are_not_named_be_they_three_times_as_noisy(caplog):
    def wrong(step, given):
        noise = torch.Generator().manual_seed(1000 + step)
        given[3]["a"] += 8**0.5 * torch.randn(40, generator=noise)

    assert watched(gl.Median(), wrong, 30, gl.Watch(patience=1), caplog)[0] == []
    assert watched(gl.Median(), lambda step, given: None, 30, gl.Watch(patience=1), caplog)[0] == []


@pytest.mark.parametrize("same", ["all equal", "all zero"])
def test_ranks_that_agree_have_no_outlier(same, caplog):
    def wrong(step, given):
        for own in given:
            for name in own:
                own[name] = given[0][name].clone() if same == "all equal" else torch.zeros_like(own[name])

    assert watched(gl.GeometricMedian(), wrong, 6, gl.Watch(patience=1), caplog)[0] == []


def test_of_two_ranks_nobody_is_the_outlier(caplog):
    def wrong(step, given):
        given[1]["a"] *= 1e6

    assert watched(gl.Median(), wrong, 8, gl.Watch(patience=1), caplog, world=2)[0] == []


@both_kinds
def test_a_colluding_minority_is_named(rule, caplog):
    def wrong(step, given):
        for rank in (6, 7, 8, 9):
            given[rank] = {name: -8 * part for name, part in given[0].items()}

    told, _ = watched(rule, wrong, 8, caplog=caplog, world=10)
    assert sorted({int(text.split()[1]) for text in told}) == [6, 7, 8, 9]


@both_kinds
def test_the_watch_goes_on_after_a_resume(rule, caplog):
    def wrong(step, given):
        given[2]["a"] *= 20
        given[4]["b"][0] = math.nan

    told, ranks = watched(rule, wrong, 3, caplog=caplog)
    assert [text.split(" sent")[0] for text in told] == ["rank 4", "rank 4"]
    again = gl.Simulation(gl.Combined(rule, watch=gl.Watch(patience=4)), world=5)
    again.steps = ranks.steps
    for old, new in zip(ranks.strategies, again.strategies, strict=True):
        new.load_state_dict(old.state_dict())
    caplog.clear()
    with caplog.at_level(logging.WARNING, "gradlane"):
        for step in range(3, 6):
            given = gradients(5, step)
            wrong(step, given)
            again.step(given)
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2
    assert all(text.startswith("rank 2 has been an outlier since step 0 ") for text in named)


@pytest.mark.parametrize(
    "state", [{"runs": torch.zeros(3)}, {"runs": [1]}, {"step": 3}, {"broken": "1"}, {"step": "x", "seen": 1}]
)
def test_a_damaged_state_is_refused(state):
    with pytest.raises(gl.InvalidValue, match="the state of Watch is damaged"):
        gl.Watch().load_state_dict(state)
