"""What the JSON of ``gradlane bench`` and ``gradlane train`` holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .figures import bit_rate

FAILED = ("crashed", "hung")
PHASES = ("encode", "queued", "collective", "decode")


@dataclass(frozen=True)
class Origin:
    """Which file, and what was run where."""

    file: str
    at: str
    command: str
    made: Mapping[str, object]
    settings: Mapping[str, object]
    ended: str


@dataclass(frozen=True)
class Link:
    name: str
    rate_bits: float | None
    emulated: bool
    note: str

    @property
    def where(self) -> str:
        if self.rate_bits is None:
            return "emulated, rate not limited" if self.emulated else "loopback, not shaped"
        return f"{bit_rate(self.rate_bits)}, {'emulated' if self.emulated else 'not emulated'}"


@dataclass(frozen=True)
class Request:
    """One collective of a bucket; its four segments follow one another from ``start_s``."""

    bucket: int
    phase: int
    kind: str
    payload_bytes: float | None
    start_s: float
    segments: Mapping[str, float]


@dataclass(frozen=True)
class RankStep:
    rank: int
    step: int
    backward_s: float
    end_s: float
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class BenchResult:
    """One arm on one link with one number of ranks; ``figures`` are None where none were taken."""

    link: Link
    ranks: int
    arm: str
    status: str
    detail: str
    figures: Mapping[str, float | None]
    phases: Mapping[str, float]
    timeline: tuple[RankStep, ...]


@dataclass(frozen=True)
class Bench:
    origin: Origin
    results: tuple[BenchResult, ...]


@dataclass(frozen=True)
class Point:
    """One evaluation: the loss (None: diverged) and what had been spent until then."""

    step: float
    loss: float | None
    bytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class TrainResult:
    """One arm; ``seeds`` holds the curves of the seeds that did not fail."""

    arm: str
    status: str
    detail: str
    figures: Mapping[str, float | None]
    seeds: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True)
class Train:
    origin: Origin
    link: Link
    unit: str
    target: float | None
    results: tuple[TrainResult, ...]
