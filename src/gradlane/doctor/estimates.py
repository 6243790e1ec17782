"""Estimates of the time that a gradient takes on a link, by strategy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core.uplink import uplink_of
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
    """Time of the requests of a dry run by the link's curves, one after the other, plus the work of the
    strategy on this machine, without overlap."""

    strategy: str
    wire_bytes: int
    """Of one rank."""
    uplink_bytes: int
    """On the link: of one rank, or of all ranks of a host that share it."""
    collectives: int
    sending_s: float
    work_s: float

    @property
    def seconds(self) -> float:
        return self.sending_s + self.work_s


def estimates(parameters: int, link: MeasuredLink) -> list[Estimate]:
    """For a model of square matrices, in buckets of 25 MB.

    Between hosts of several ranks, the link carries what all ranks of a host send to the others. Sending and
    work overlap neither with backward nor with each other. The effect on training is not counted.
    """
    return [_estimate(strategy, parameters, link) for strategy in STRATEGIES]


def _estimate(strategy: str, parameters: int, link: MeasuredLink) -> Estimate:
    cost = dry_run(strategy, _shapes(parameters), link.ranks, bucket_bytes=BUCKET)
    on_link = sum(uplink_of(event, link.ranks, link.ranks_per_host) for event in cost.events)
    sending = sum(
        link.curves.transfer(event.kind, event.over, event.payload_bytes).seconds for event in cost.events
    )
    work = parameters * link.work_s[strategy]
    return Estimate(strategy, cost.wire_bytes, on_link, cost.collectives, sending, work)


def _shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    matrices, remainder = divmod(parameters, WIDTH * WIDTH)
    shapes: dict[str, tuple[int, ...]] = {f"layer{index}": (WIDTH, WIDTH) for index in range(matrices)}
    if remainder:
        shapes["remainder"] = (remainder,)
    return shapes


def parse_count(text: str) -> int:
    """``9.4M``, ``350k``, ``7B`` or a plain number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmbg]?)", text.strip().lower())
    count = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not 1 <= count <= MOST:
        raise InvalidValue(f"{text!r} parameters are not possible; write a number such as 9.4M, 350k or 7B")
    return count
