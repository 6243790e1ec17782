"""Where the moments of a device lie on the host's clock."""

from dataclasses import dataclass

import pytest

from gradlane.lane.device_clock import DeviceClock, Mark, _Lap


@dataclass
class Stamp:
    """An event of a device whose clock is ahead of the host's."""

    at: float

    def elapsed_time(self, later):
        return (later.at - self.at) * 1000


@dataclass
class Request:
    step: int
    bucket: int = 0
    phase: int = 0
    kind: str = "all_reduce"


AHEAD = 500.0


def clock(lags, step=3):
    """Marks that the host issues every second, and a device that is late by ``lags``."""
    marks = [Mark(Stamp(AHEAD + issued + lag), float(issued)) for issued, lag in enumerate(lags)]
    began, asked, computed, answered, over, ended = marks
    found = DeviceClock("cpu")
    found._marks += marks
    found.add(_Lap(Request(step), began, asked, answered, over))
    found._computed, found._ended, found._step = computed, ended, 3
    return found


LAGS = (2.0, 4.0, 4.0, 5.0, 6.0, 7.0)


def test_the_end_is_now_if_the_host_has_waited_for_it():
    times = clock(LAGS).read(12.5, waited=True)
    (request,) = times.requests
    assert (request.began, request.encode, request.collective, request.decode) == (2.5, 3.0, 3.0, 2.0)
    assert (times.step, times.computed, times.ended, times.exposed) == (3, 6.5, 12.5, 6.0)


def test_otherwise_no_kernel_runs_before_its_call():
    times = clock(LAGS).read(100.0, waited=False)
    assert times.requests[0].began == pytest.approx(0.0)
    assert times.ended == pytest.approx(10.0)


def test_a_step_that_nobody_has_ended_is_not_timed():
    assert clock(LAGS, step=2).read(100.0, waited=False) is None


def test_events_are_free_again():
    found = clock(LAGS)
    found.forget()
    assert len(found._free) == 6
    assert found.read(100.0, waited=True) is None
