"""What a gradient would take on a link, by its bytes alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidValue
from ..simulate.dryrun import dry_run
from .measure_link import WIDTH, MeasuredLink

STRATEGIES = (
    "Mean()",
    "Cast(Mean(), bfloat16)",
    "Sharded(Int8())",
    "ErrorFeedback(Sharded(Int4()))",
    "ErrorFeedback(Gathered(TopK(0.01)))",
    "ErrorFeedback(PowerSGD(4))",
)
BUCKET = 25 * 2**20
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
MOST = 10**12


@dataclass(frozen=True)
class Estimate:
    """The dry run's bytes on the link, and the work of the strategy on this machine, one after the other."""

    strategy: str
    wire_bytes: int
    collectives: int
    sending_s: float
    work_s: float

    @property
    def seconds(self) -> float:
        return self.sending_s + self.work_s


def estimates(parameters: int, link: MeasuredLink) -> list[Estimate]:
    """For a model of square matrices, in buckets of 25 MB; nothing is hidden behind backward or behind each
    other, and what a strategy does to training is not looked at."""
    return [_estimate(strategy, parameters, link) for strategy in STRATEGIES]


def _estimate(strategy: str, parameters: int, link: MeasuredLink) -> Estimate:
    trace = dry_run(strategy, _shapes(parameters), link.ranks, bucket_bytes=BUCKET)
    sending = trace.wire_bytes / link.bytes_per_s + trace.collectives * link.latency_s
    work = parameters * link.work_s[strategy]
    return Estimate(strategy, trace.wire_bytes, trace.collectives, sending, work)


def _shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    whole, rest = divmod(parameters, WIDTH * WIDTH)
    shapes: dict[str, tuple[int, ...]] = {f"layer{index}": (WIDTH, WIDTH) for index in range(whole)}
    if rest:
        shapes["rest"] = (rest,)
    return shapes


def parse_count(text: str) -> int:
    """``9.4M``, ``350k``, ``7B`` or a plain number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmbg]?)", text.strip().lower())
    count = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not 1 <= count <= MOST:
        raise InvalidValue(f"{text!r} parameters are not possible; write a number such as 9.4M, 350k or 7B")
    return count
