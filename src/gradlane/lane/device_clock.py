"""What requests take on a device: timing events on the lane's stream, read when a step has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core.collectives import Request
from ..core.events import DeviceTimes, DeviceTiming, Event
from ..core.running import State
from .requests import Job


class Mark(NamedTuple):
    """A place in the work of a stream."""

    event: torch.Event
    issued: float  # on the host, which is ahead of the device


@dataclass(slots=True)
class _Lap:
    """One request on the stream."""

    request: Event
    began: Mark
    asked: Mark
    answered: Mark | None = None
    ended: Mark | None = None  # the strategy's work after its last answer


class DeviceClock:
    """Marks the work of a step on streams, and reads the marks when the host has waited for its end anyway.

    Events are used again, so there are as many as the longest step needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []
        self._marks: list[Mark] = []
        self._laps: list[_Lap] = []
        self._step = -1  # that ended last
        self._computed: Mark | None = None
        self._ended: Mark | None = None

    def mark(self) -> Mark:
        """Here, on the current stream."""
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        self._marks.append(Mark(event, time.perf_counter()))
        return self._marks[-1]

    def computed(self) -> None:
        """The caller's stream has the last bucket of the step."""
        self._computed = self.mark()

    def end(self, step: int) -> None:
        """The lane's stream has ended a step. If nobody has ended the step before, that one is not timed."""
        self._step, self._ended = step, self.mark()

    def add(self, lap: _Lap) -> None:
        self._laps.append(lap)

    def forget(self) -> None:
        """Begin anew: the step has failed, or was none."""
        self._free += [mark.event for mark in self._marks]
        self._marks.clear()
        self._laps.clear()
        self._computed = self._ended = None

    def read(self, seen: float, *, waited: bool) -> DeviceTimes | None:
        """What the step took. The host knows at ``seen`` that the step has ended; ``waited`` if it did not
        know at once, so that the device was there a moment ago.

        A device has a clock of its own. If the host has waited, the end of the step is the same moment on
        both. Otherwise all that is known is that no mark was passed before it was issued.
        """
        computed, ended = self._computed, self._ended
        laps = [lap for lap in self._laps if lap.request.step == self._step]
        if computed is None or ended is None or not laps:
            return None
        offset = seen - self._at(ended) if waited else max(m.issued - self._at(m) for m in self._marks)
        requests = tuple(_timing(lap, offset + self._at(lap.began)) for lap in laps)
        return DeviceTimes(self._step, requests, offset + self._at(computed), offset + self._at(ended))

    def _at(self, mark: Mark) -> float:
        """Seconds after the first mark."""
        return _seconds(self._marks[0], mark)


def _timing(lap: _Lap, began: float) -> DeviceTiming:
    assert lap.answered is not None
    return DeviceTiming(
        lap.request.bucket, lap.request.phase, lap.request.kind, began,
        encode=_seconds(lap.began, lap.asked),
        collective=_seconds(lap.asked, lap.answered),
        decode=0.0 if lap.ended is None else _seconds(lap.answered, lap.ended),
    )  # fmt: skip


def _seconds(since: Mark, until: Mark) -> float:
    return since.event.elapsed_time(until.event) / 1000


class TimedJob(Job):
    """A job whose work is marked on the stream: when its strategy goes on, asks, and ends."""

    def __init__(self, clock: DeviceClock, *of_job: Any) -> None:
        super().__init__(*of_job)
        self._clock = clock
        self._lap: _Lap | None = None
        self._resumed: Mark | None = None

    def resume(self, answer: object = None) -> State:
        self._resumed = self._clock.mark()
        if self._lap is not None and self._lap.answered is None:
            self._lap.answered = self._resumed
        state = super().resume(answer)
        if self._lap is not None and self._lap.ended is None and not isinstance(state, Request):
            self._lap.ended = self._clock.mark()
        return state

    def asks(self, event: Event) -> None:
        """Before the request is performed."""
        assert self._resumed is not None
        self._lap = _Lap(event, self._resumed, self._clock.mark())
        self._clock.add(self._lap)
