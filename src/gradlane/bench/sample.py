"""One measured step of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.events import Event


@dataclass(frozen=True)
class Sample:
    """One step of one rank. Times are ``time.perf_counter``, which all processes of a machine share."""

    start: float
    computed: float  # when backward had computed the last gradient
    end: float
    cpu: float
    ledger_bytes: int
    uplink_bytes: int  # of the rank's node; 0 without nodes
    counter: tuple[int, int] | None  # of the interface, before and after
    events: list[Event] = field(default_factory=list)
    period: int = 1  # steps that the counter counted


Step = Sequence[Sample]  # one for each rank


def per_step(samples: Sequence[Sample]) -> Sample:
    """The mean of a period, without its events: they are of another time scale."""
    start, count = samples[0].start, len(samples)

    def mean(figure: Callable[[Sample], float]) -> float:
        return sum(map(figure, samples)) / count

    first, last = samples[0].counter, samples[-1].counter
    return Sample(
        start=start,
        computed=start + mean(lambda s: s.computed - s.start),
        end=start + mean(lambda s: s.end - s.start),
        cpu=mean(lambda s: s.cpu),
        ledger_bytes=round(mean(lambda s: s.ledger_bytes)),
        uplink_bytes=round(mean(lambda s: s.uplink_bytes)),
        counter=None if first is None or last is None else (first[0], last[1]),
        period=count,
    )
