"""Who listens to an attachment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..core.events import Event, StepTimes
from ..errors import WrongType

Observer = Callable[[Event], None]


@dataclass(frozen=True)
class RunInfo:
    """What a sink may want to know before the first event."""

    rank: int
    world: int
    strategy: str


class Sink:
    """An observer that also hears of steps, and has an end. Every method may stay as it is."""

    def opened(self, run: RunInfo) -> None:
        """At ``attach``, before the first event."""

    def __call__(self, event: Event) -> None:
        """For every request, on the lane's thread: keep it short, format later. If it raises, the step fails
        on all ranks."""

    def step_ended(self, times: StepTimes) -> None:
        """At the end of every backward, on the thread that called it, when the lane is idle. All ranks have
        taken the step: if this raises it is logged, and the sink hears no more."""

    def close(self) -> None:
        """When the attachment is closed. Twice is fine."""


def observers_of(given: Observer | Iterable[Observer] | None) -> tuple[Observer, ...]:
    """One observer, several, or none."""
    found = () if given is None else (given,) if callable(given) else tuple(given)
    for observer in found:
        if not callable(observer):
            raise WrongType(
                f"observer {observer!r} cannot be called; pass a function of one Event, "
                "a sink such as gradlane.JsonLines(path), or a list of them"
            )
    return found
