"""The states of a step: every legal way through them, and what is refused."""

import inspect
from pathlib import Path

import pytest
import torch

import gradlane as gl
from gradlane.core.bucket import Layout, Slot
from gradlane.core.events import StepTimes
from gradlane.core.scopes import ALONE
from gradlane.feed.ddp import DdpFeed
from gradlane.feed.nonfinite import NonFinitePolicy
from gradlane.feed.step import NEXT, OVER, State, Step
from gradlane.lane.one_rank import OneRank
from gradlane.lane.stream import StreamLane

LAYOUT = Layout([Slot("weight", torch.Size([4]))])


class Book:
    def __init__(self):
        self.times, self.skips = [], 0

    observed = False

    def on_event(self, event): ...
    def on_note(self, bucket, note): ...
    def on_device_times(self, times): ...
    def gradient(self, raw_bytes, dense_wire_bytes, last): ...

    def skipped(self):
        self.skips += 1

    def step_ended(self, times):
        self.times.append(times)


class Fragile(gl.Strategy):
    async def reduce(self, bucket):
        raise ValueError("broken")


@pytest.fixture
def book():
    return Book()


@pytest.fixture
def step(book):
    lane = StreamLane({"world": OneRank()}, torch.device("cpu"), book)
    return Step(lane, book, scopes=ALONE, policy=NonFinitePolicy("skip", lane.check))


def submit(step, value=1.0, *, index=0, is_last=True, strategy=None):
    flat = torch.full((4,), value)
    return step.submit(strategy or gl.Mean(), flat, LAYOUT, index=index, is_last=is_last)


def test_a_step_is_committed(step, book):
    assert step.state is State.IDLE
    step.begin(gl.Mean())
    assert (step.state, step.number, step.next) == (State.BEGUN, 0, 0)
    submit(step, is_last=False)
    assert (step.state, step.next) == (State.BEGUN, 0)
    submit(step, index=1)
    assert (step.state, step.number, step.next) == (State.SUBMITTED, 0, 1)
    assert step.wait() is None
    assert step.state is State.COMPUTED
    assert step.end(0.0) is None
    assert step.state is State.COMMITTED
    assert [type(times) for times in book.times] == [StepTimes]
    assert step.layout() == [["weight"], ["weight"]]


def test_a_mean_that_is_not_finite_skips_the_step(step, book):
    step.begin(gl.Mean())
    submit(step, float("nan"))
    step.wait()
    assert step.end(0.0) is None
    assert (step.state, book.skips) == (State.SKIPPED, 1)


def test_a_strategy_that_raises_fails_the_step(step):
    step.begin(gl.Mean())
    submit(step, strategy=Fragile())
    failure = step.wait()
    assert str(failure) == "broken"
    assert step.end(0.0) is failure
    assert step.state is State.FAILED


def test_a_step_that_stopped_fails_when_the_next_one_begins_and_keeps_its_number(step, book):
    step.begin(gl.Mean())
    submit(step, is_last=False)
    step.begin(gl.Mean())
    assert (step.state, step.number) == (State.BEGUN, 0)
    assert not book.times


def test_a_complete_step_that_nobody_ended_counts(step):
    step.begin(gl.Mean())
    submit(step)
    step.finish()
    assert (step.state, step.next) == (State.COMMITTED, 1)
    step.finish()  # nothing is left to do


class FakeBucket:
    """What DDP gives a hook."""

    def __init__(self, parameter, index):
        self.parameter, self.position = parameter, index

    def index(self):
        return self.position

    def is_last(self):
        return self.position == 1

    def buffer(self):
        return torch.ones(self.parameter.numel())

    def parameters(self):
        return [self.parameter]


def test_buckets_of_two_models_may_come_in_turns(step):
    feed = DdpFeed(step, name_of=lambda bucket, position, parameter: f"{bucket}.{position}")
    models = [[torch.nn.Parameter(torch.zeros(4)) for _ in range(2)] for _ in range(2)]
    for index in range(2):
        for parameters in models:
            future = feed.reduce(FakeBucket(parameters[index], index), gl.Mean())
            assert torch.equal(future.wait(), torch.ones(4))
    assert (step.state, step.next) == (State.COMMITTED, 2)


@pytest.mark.parametrize(("strategy", "state"), [(gl.Mean(), State.COMMITTED), (Fragile(), State.FAILED)])
def test_a_step_that_was_interrupted_before_its_end_is_finished(step, strategy, state):
    step.begin(strategy)
    submit(step, strategy=strategy)
    step.wait()
    step.finish()
    assert step.state is state


def test_what_is_out_of_order_is_refused(step):
    with pytest.raises(gl.WrongState, match=r"cannot become SUBMITTED .*it is IDLE"):
        submit(step)
    with pytest.raises(gl.WrongState, match="cannot become COMPUTED"):
        step.wait()
    step.begin(gl.Mean())
    with pytest.raises(gl.WrongState, match=r"cannot become COMPUTED .*: it is BEGUN"):
        step.wait()
    submit(step)
    with pytest.raises(gl.WrongState, match="it is SUBMITTED"):
        submit(step, index=1)
    with pytest.raises(gl.WrongState, match="cannot become COMMITTED"):
        step.end(0.0)


def test_the_readme_has_every_state_and_every_file():
    folder = Path(inspect.getfile(Step)).parent
    text = (folder / "README.md").read_text()
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert rows == {state.name for state in State}
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert {word for word in text.split("## Files")[1].split("`") if word.endswith(".py")} == files
    assert len(text.splitlines()) <= 60


def test_every_state_is_reached_and_left():
    assert set(NEXT) == set(State)
    assert {after for states in NEXT.values() for after in states} == set(State) - {State.IDLE}
    assert all(NEXT[state] == {State.BEGUN} for state in OVER)
