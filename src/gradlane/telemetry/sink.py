"""Observers and sinks: the listeners of an attachment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..core.events import DeviceTimes, Event, StepTimes
from ..errors import WrongType

Observer = Callable[[Event], None]


@dataclass(frozen=True)
class RunInfo:
    """What a sink knows of a run before the first event."""

    rank: int
    world: int
    strategy: str
    kernels: str = ""
    """Those that do the work of codecs: in C, in Triton, or plain torch and why."""


class Sink:
    """An observer that also gets steps and is closed at the end. Override what you need."""

    def opened(self, run: RunInfo) -> None:
        """Called by ``attach``, before the first event."""

    def __call__(self, event: Event) -> None:
        """Called for every request, on the lane's thread: keep it short, format later. If it raises, the step
        fails on all ranks."""

    def device_timed(self, times: DeviceTimes) -> None:
        """Called on a device before ``step_ended``: what the step took there, by the device's own clock. An
        ``Event`` of the step came earlier, when the host had called the kernels."""

    def step_ended(self, times: StepTimes) -> None:
        """Called at the end of every backward, on its thread, when the lane is idle. All ranks have done the
        step: an error is logged, and the sink gets no more events."""

    def close(self) -> None:
        """Called when the attachment is closed; perhaps twice."""


def observers_of(observer: Observer | Iterable[Observer] | None) -> tuple[Observer, ...]:
    """One observer, several, or none."""
    found = () if observer is None else (observer,) if callable(observer) else tuple(observer)
    for one in found:
        if not callable(one):
            raise WrongType(
                f"observer {one!r} cannot be called; pass a function of one Event, "
                "a sink such as gradlane.JsonLines(path), or a list of them"
            )
    return found
