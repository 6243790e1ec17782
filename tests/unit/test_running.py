"""The loop that lanes, Simulation and dry run share."""

import pytest
import torch

import gradlane as gl
from gradlane.core import trust
from gradlane.core.collectives import Request, StepSum
from gradlane.core.running import Driver, Running
from gradlane.lane import finite_check
from gradlane.lane.finite_check import BAD, FINE, FiniteCheck


def bucket(index=0, *, last=True, values=(1.0, 2.0)):
    layout = (gl.Slot(f"p{index}", torch.Size([len(values)])),)
    return gl.Bucket(torch.tensor(values), layout, 0, 0, 1, index=index, is_last=last)


def running(strategy, *args, **kwargs):
    return Running(strategy, bucket(*args, **kwargs), lambda bucket, note: None)


@gl.strategy_from
async def sums_and_reduces(bucket):
    total = await gl.step_sum(bucket.flat.sum())
    return gl.Reduced(await gl.all_reduce(bucket.flat * total))


def test_resume_returns_what_the_strategy_awaits_and_then_its_result():
    own = running(sums_and_reduces)
    assert own.state is None
    assert isinstance(own.resume(), StepSum)
    assert own.doing() == "before its first request, waiting for the step's other buckets"
    request = own.resume(torch.tensor(3.0))
    assert isinstance(request, Request)
    assert own.phase == 0
    assert own.doing() == "phase 0: all_reduce mean(float32[2])"
    assert own.resume(request.payloads[0][0]) is own.state
    assert own.state.mean.tolist() == [3.0, 6.0]


class Recording(Driver):
    """Answers each request with its own tensor, and records what happens."""

    def __init__(self):
        self.calls = []

    def perform(self, running, request):
        self.calls.append(("perform", running.bucket.index, running.phase))
        return request.payloads[0][0]

    def performed(self, running):
        self.calls.append(("performed", running.bucket.index, running.phase))

    def finished(self, running, reduced):
        self.calls.append(("finished", running.bucket.index, reduced.mean.tolist()))


def test_buckets_that_wait_for_a_sum_go_on_in_their_order():
    driver = Recording()
    buckets = [running(sums_and_reduces, index, last=index == 2, values=(1.0,)) for index in range(3)]
    for own in buckets:
        own.resume()
        driver.advance(own)
    assert driver.calls == []
    driver.meet(buckets)
    assert driver.calls == [
        call
        for index in range(3)
        for call in (("perform", index, 0), ("performed", index, 0), ("finished", index, [3.0]))
    ]


@gl.strategy_from
async def fails_on_its_answer(bucket):
    await gl.all_reduce(bucket.flat)
    raise RuntimeError("no")


def test_a_request_counts_as_performed_though_the_strategy_fails_on_its_answer():
    driver, own = Recording(), running(fails_on_its_answer)
    own.resume()
    with pytest.raises(RuntimeError, match="no"):
        driver.advance(own)
    assert driver.calls == [("perform", 0, 0), ("performed", 0, 0)]
    assert driver.serving is own


def test_a_result_that_is_a_bounded_answer_is_bounded():
    for known in (False, True):
        own = running(gl.Mean())
        answer = own.resume().payloads[0][0]
        own.bounded_answer = answer if known else None
        assert own.resume(answer).bounded is known


@pytest.fixture
def asked(monkeypatch):
    """The strategies about which the check has asked whether they are our own."""
    found = []
    monkeypatch.setattr(finite_check, "is_our_own", lambda s: found.append(s) or trust.is_our_own(s))
    return found


def test_a_strategy_is_examined_once_a_step(asked):
    check, strategy = FiniteCheck(), gl.Mean()
    check.on = True
    for step in range(2):
        check.begin()
        for index in range(3):
            own = bucket(index)
            object.__setattr__(own, "step", step)
            check.add(strategy, own, gl.Reduced(own.flat, bounded=True))
    assert asked == [strategy, strategy]
    assert check.seen == FINE


def test_a_bounded_result_is_read_if_a_part_of_the_strategy_is_foreign(asked):
    check, own = FiniteCheck(), bucket(values=(1.0, float("inf")))
    check.on = True
    check.add(gl.Mean(), own, gl.Reduced(own.flat, bounded=True))  # believed, without reading it
    assert check.seen == FINE
    check.add(sums_and_reduces, own, gl.Reduced(own.flat, bounded=True))
    assert check.seen == BAD
    assert check.names() == ["p0", "p0"]
