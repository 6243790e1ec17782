"""The beat of a step: when compute has the buckets ready, if nothing else takes time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ..errors import InvalidValue


@dataclass(frozen=True)
class Beat:
    """Seconds of one step's compute alone."""

    rest: float
    """From the end of the last step's last wait to the first bucket being ready."""
    gaps: tuple[float, ...]
    """Between two buckets becoming ready: one fewer than there are buckets."""
    tail: float
    """From the last bucket being ready to the end of backward's compute."""
    cores: float = 1.0
    """Cores that compute keeps busy; 0 if it runs on an accelerator."""
    beside: float = 0.0
    """By how much a step with a small message for each bucket, through the lane, is longer than forecast: its
    threads wait for processors that compute uses, and ranks for each other."""

    def __post_init__(self) -> None:
        least = min((self.rest, self.tail, self.cores, self.beside, *self.gaps))
        if not least >= 0:
            raise InvalidValue(f"a beat of {least:g} s is not possible; times and cores are 0 or more")

    @property
    def compute(self) -> float:
        return self.rest + sum(self.gaps) + self.tail

    @property
    def buckets(self) -> int:
        return len(self.gaps) + 1

    def lasting(self, compute: float) -> Beat:
        """The same beat, stretched to another time of compute."""
        factor = compute / self.compute
        gaps = tuple(gap * factor for gap in self.gaps)
        return replace(self, rest=self.rest * factor, gaps=gaps, tail=self.tail * factor)


def typical_beat(beats: Sequence[Beat]) -> Beat:
    """The medians of several steps, which must have the same number of buckets."""
    counts = {beat.buckets for beat in beats}
    if len(counts) != 1:
        raise InvalidValue(
            f"the steps have {sorted(counts)} buckets; give one step or more, all with the same buckets"
        )
    return Beat(
        rest=median(beat.rest for beat in beats),
        gaps=tuple(median(times) for times in zip(*(beat.gaps for beat in beats), strict=True)),
        tail=median(beat.tail for beat in beats),
        cores=median(beat.cores for beat in beats),
    )


def even_beat(compute: float, bucket_bytes: Sequence[int], forward: float = 1 / 3) -> Beat:
    """Of a step whose compute is known and nothing else: backward takes two thirds of it, and each bucket a
    time in proportion to its size."""
    whole = sum(bucket_bytes)
    shares = [compute * (1 - forward) * size / whole for size in bucket_bytes]
    return Beat(rest=compute * forward + shares[0], gaps=tuple(shares[1:]), tail=0.0)


def beat_from(found: Mapping[str, Any]) -> Beat:
    """From what ``asdict`` made of it, after it has been JSON."""
    return Beat(found["rest"], tuple(found["gaps"]), found["tail"], found["cores"], found["beside"])
