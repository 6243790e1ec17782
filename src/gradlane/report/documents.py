"""What the JSON of ``gradlane bench``, ``train`` and ``plan`` holds. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .number_format import bit_rate

FAILED = ("crashed", "hung")
PHASES = ("encode", "queued", "collective", "decode")
Figure = float | None  # None: it was not measured


class Record(Struct, frozen=True, kw_only=True):
    """What both kinds of documents say about a run: how it was made, and how it ended."""

    made: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    ended: str = ""


class OnLink(Struct, frozen=True, kw_only=True):
    """The link under a measurement."""

    rate_bits: Figure = None
    emulated: bool = False
    note: str = ""

    @property
    def where(self) -> str:
        if self.rate_bits is None:
            return "emulated, rate not limited" if self.emulated else "loopback, not shaped"
        return f"{bit_rate(self.rate_bits)}, {'emulated' if self.emulated else 'not emulated'}"


class Phases(Struct, frozen=True, kw_only=True):
    """Seconds in each of ``PHASES``."""

    encode_s: float = 0.0
    queued_s: float = 0.0
    collective_s: float = 0.0
    decode_s: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        return {phase: max(0.0, getattr(self, f"{phase}_s")) for phase in PHASES}


class Request(Phases, frozen=True, kw_only=True):
    """One collective of a bucket; its four phases follow one another from ``start_s``."""

    bucket: int
    phase: int
    kind: str
    payload_bytes: Figure = None
    start_s: float = 0.0


class RankStep(Struct, frozen=True, kw_only=True):
    """One step of one rank; ``backward_s`` and ``end_s`` count from the first rank's start."""

    rank: int
    step: int
    backward_s: float = 0.0
    end_s: float = 0.0
    requests: tuple[Request, ...] = ()


class BenchResult(OnLink, frozen=True, kw_only=True):
    """One arm on one link with one number of ranks."""

    link: str
    ranks: int
    nodes: int | None = None
    interface_of: str = "rank"
    arm: str
    status: str
    detail: str = ""
    median_s: Figure = None
    min_s: Figure = None
    cpu_s: Figure = None
    exposed_s: Figure = None
    ledger_bytes: Figure = None
    uplink_bytes: Figure = None
    interface_bytes: Figure = None
    speedup: Figure = None
    speedup_hsdp: Figure = None
    of_limit: Figure = None
    phases: Phases | None = None
    timeline: tuple[RankStep, ...] | None = None


class Bench(Record, frozen=True, kw_only=True):
    results: tuple[BenchResult, ...] = ()


class Point(Struct, frozen=True):
    """One evaluation: the loss (None: it diverged), and what was spent until then."""

    step: float
    loss: Figure
    bytes: Figure
    seconds: Figure


class TrainRun(Struct, frozen=True, kw_only=True):
    """One arm with one seed; a column for each quantity, a row for each evaluation."""

    status: str
    steps: tuple[Figure, ...] = ()
    loss: tuple[Figure, ...] = ()
    bytes: tuple[Figure, ...] = ()
    seconds: tuple[Figure, ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("steps", "loss", "bytes", "seconds")}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise ValueError(f"it has {found}: the columns must have the same length")

    @property
    def curve(self) -> tuple[Point, ...]:
        rows = zip(self.steps, self.loss, self.bytes, self.seconds, strict=True)
        return tuple(Point(step, *spent) for step, *spent in rows if step is not None)


class Trial(Struct, frozen=True, kw_only=True):
    """One arm with one learning rate of the grid, on the tuning seed."""

    lr: float
    status: str
    loss: Figure = None


class TrainResult(Struct, frozen=True, kw_only=True):
    """One arm with all its seeds."""

    arm: str
    status: str
    detail: str = ""
    remark: str = ""
    lr: Figure = None
    tuning: tuple[Trial, ...] = ()
    final_loss: Figure = None
    gap: Figure = None
    gap_interval: Figure = None
    bytes_per_step: Figure = None
    seconds_per_step: Figure = None
    phases: Phases | None = None
    to_target_s: Figure = None
    to_target_bytes: Figure = None
    runs: tuple[TrainRun, ...] | None = None

    @property
    def seeds(self) -> list[tuple[Point, ...]]:
        """The curves of the seeds that did not fail."""
        return [run.curve for run in self.runs or () if run.status not in FAILED]


class TrainLink(OnLink, frozen=True, kw_only=True):
    name: str


class Train(Record, frozen=True, kw_only=True):
    link: TrainLink
    unit: str = ""
    target: Figure = None
    results: tuple[TrainResult, ...] = ()


class PlanResult(Struct, frozen=True, kw_only=True):
    """The forecast of one arm."""

    arm: str
    loss: str = ""
    node_bytes: Figure = None
    seconds: float
    exposed_s: Figure = None
    work_s: Figure = None
    speedup: Figure = None
    verdict: str = ""
    why: str = ""
    pays_below_bits: Figure = None
    pays_at_any_rate: bool = False


class Sweep(Struct, frozen=True, kw_only=True):
    """Seconds of a step by the rate of the link, for each arm."""

    rates_bits: tuple[float, ...] = ()
    seconds: dict[str, tuple[float, ...]] = {}

    def __post_init__(self) -> None:
        for arm, seconds in self.seconds.items():
            if len(seconds) != len(self.rates_bits):
                raise ValueError(f"{arm} has {len(seconds)} times for {len(self.rates_bits)} rates")


class MoreRanks(Struct, frozen=True, kw_only=True):
    """The forecast of one arm with more ranks than were measured."""

    ranks: int
    arm: str
    seconds: float
    low_s: float
    high_s: float
    speedup: float


class Plan(Record, frozen=True, kw_only=True):
    ranks: int
    compute_s: float
    rate_bits: Figure = None
    off: bool = False
    error: float = 0.05
    note: str = ""
    results: tuple[PlanResult, ...] = ()
    sweep: Sweep = Sweep()
    more_ranks: tuple[MoreRanks, ...] = ()
