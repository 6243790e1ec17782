"""The course of ``Auto``: blocks of steps, the exchange of figures, and steps that do not count."""

import random

import pytest
import torch

import gradlane as gl
from gradlane.strategies.auto.course import Course
from gradlane.strategies.auto.decisions import Decision
from gradlane.strategies.auto.trial import Block
from gradlane.strategies.auto.tuner import nothing_known, tune

OFF, INT8, INT4 = "Mean()", "Sharded(Int8())", "ErrorFeedback(Sharded(Int4()))"


def course():
    return Course({OFF: False, INT8: False, INT4: True}, {})


class Clock:
    def __init__(self, seconds=1.0):
        self.now, self.seconds = 0.0, seconds

    def __call__(self):
        self.now += self.seconds
        return self.now


def asked(blocks):
    """A tuner that asks for these blocks, and keeps the answers."""
    answers = []

    def ask():
        for block in blocks:
            answers.append((yield block))

    return ask(), answers


def step(course, number, end="keep"):
    """One step of one rank alone; whether it exchanged."""
    course.begin(number)
    due = course.due
    if due:
        course.take(course.row())
    getattr(course, end)()
    return due


def test_a_block_is_timed_after_a_change_and_exchanged_after_the_timed_steps():
    own = course()
    blocks, answers = asked([Block(OFF, 3), Block(INT8, 2), Block(INT8, 2), Block(OFF, 1)])
    own.start(blocks, Clock(), 0)
    due, used = [], []
    for number in range(14):
        due.append(step(own, number))
        used.append(own.now)
    #      OFF: 3 timed     INT8: 1 untimed, 2 timed    INT8: 2 timed    OFF: 1 untimed, 1 timed
    exchange = [3, 7, 10, 13]
    assert [number for number, is_due in enumerate(due) if is_due] == exchange
    assert used == [OFF] * 4 + [INT8] * 7 + [OFF] * 3
    assert answers == [1.0, 1.0, 1.0]
    assert [(d.step, d.strategy) for d in own.decisions] == [(4, INT8), (11, OFF)]


def test_the_median_counts():
    own = course()
    blocks, answers = asked([Block(OFF, 3), Block(OFF, 3)])
    times = iter([0.0, 1.0, 101.0, 103.0])
    own.start(blocks, lambda: next(times), 0)
    for number in range(4):
        step(own, number)
    own._clock = Clock()
    step(own, 4)
    assert answers == [2.0]


@pytest.mark.parametrize(("end", "again"), [("keep", False), ("skip", False), ("undo", True)])
def test_after_a_step_that_failed_the_figures_are_exchanged_again(end, again):
    own = course()
    own.undoable = True
    blocks, answers = asked([Block(OFF, 1), Block(INT8, 1)])
    own.start(blocks, Clock(), 0)
    step(own, 0)
    assert step(own, 1, end)
    assert step(own, 2) == again
    assert len(answers) == (0 if again else 1)


def test_a_residual_is_flushed_until_a_flush_counts():
    own = course()
    own.undoable = True
    blocks, _ = asked([Block(INT4, 1), Block(OFF, 9)])
    own.start(blocks, Clock(), 0)
    for number in range(3):  # untimed, timed, exchange
        step(own, number)
        assert not own.flushes
    flushed = []
    for number, end in enumerate(["undo", "skip", "keep", "keep"], start=3):
        step(own, number, end)
        flushed.append(own.flushes)
    assert flushed == [True, True, True, False]


def test_ranks_with_other_decisions_are_noticed():
    one, other = course(), course()
    for own in (one, other):
        blocks, _ = asked([Block(OFF, 1), Block(INT8, 1)])
        own.start(blocks, Clock(), 0)
        own.begin(0)
        own.begin(1)
    other.decisions.append(Decision(0, INT8, "nobody else knows"))
    largest = [max(pair) for pair in zip(one.row(), other.row(), strict=True)]
    for own in (one, other):
        with pytest.raises(gl.RanksDisagree, match="decided differently"):
            own.take(largest)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_with_other_clocks_decide_alike_in_the_simulation(world):
    """Every rank sees times of its own."""
    ranks = gl.Simulation(gl.Auto(among=[INT8, INT4]), world=world)
    mean = {OFF: 1.0, INT8: 0.7, INT4: 0.6}
    for rank, strategy in enumerate(ranks.strategies):
        draw, own = random.Random(rank), strategy.course

        def clock(draw=draw, own=own, now=[0.0]):  # noqa: B006  kept between the calls
            now[0] += mean[own.now] * (0.5 + draw.random())
            return now[0]

        own.start(tune(strategy.allowed, nothing_known, OFF), clock, 0)
    for number in range(100):
        generator = torch.Generator().manual_seed(number)
        ranks.step([{"weight": torch.randn(40, generator=generator)} for _ in range(world)])
    decisions = [strategy.course.decisions for strategy in ranks.strategies]
    assert len(decisions[0]) > 3
    assert all(found == decisions[0] for found in decisions)


def test_a_state_of_another_ladder_is_refused():
    saved = {"now": "Sharded(Int2())", "decisions": {}, "holds_residual": False, "flushes": False}
    with pytest.raises(gl.InvalidValue, match="this Auto chooses among Mean"):
        course().load_state_dict(saved)
    with pytest.raises(gl.InvalidValue, match="lack"):
        course().load_state_dict({**saved, "now": OFF, "decisions": {"0": {"step": 1}}})
