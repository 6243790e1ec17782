"""Latency and rate of the link between the ranks, measured with all-reduces on a lane."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..agree.limits import Limit
from ..core.bucket import Bucket, Slot
from ..core.collectives import Op, all_reduce
from ..core.events import wire_bytes
from ..core.strategy import Reduced, Strategy
from ..lane.open import Opened, open_lane
from ..strategies.text import parse
from ..telemetry.ledger import Ledger

SMALL = 1  # elements
FIRST, LARGEST = 1 << 16, 1 << 24  # elements: 256 KiB to 64 MiB
LONG_ENOUGH = 0.25  # seconds of one all-reduce; a longer one would not be more exact
REPEATS = 3
WIDTH, NARROW = 1024, 256  # of the matrix that times the strategies; NARROW on slow links
SENDING_SECONDS = 0.5  # for timing one strategy
MOST_REPEATS = 8
TIMES_SMALL = 30
TIMEOUT = 20.0
TOGETHER = "start all ranks at the same time, on idle machines"


@dataclass(frozen=True)
class MeasuredLink:
    ranks: int
    latency_s: float
    """Time of an all-reduce of 4 bytes."""
    bytes_per_s: float
    """Bytes that each rank sends, and receives at the same time, in a large all-reduce."""
    largest_bytes: int
    work_s: dict[str, float] = field(default_factory=dict)
    """CPU time of this machine per element, by strategy."""
    ranks_per_host: int = 1
    """Ranks that share the link of a host; 1 if all are on one host."""


@dataclass
class _Probe(Strategy):
    op: Op

    async def reduce(self, bucket: Bucket) -> Reduced:
        return Reduced(await all_reduce(bucket.flat, op=self.op, exact=True))


def measure(group: Any, device: torch.device, strategies: Sequence[str] = ()) -> MeasuredLink:
    """Call it on all ranks of the group. It takes a few seconds on a link of 20 Mbit/s or more."""
    ledger = Ledger()
    opened = open_lane(
        group, device, ledger, {"version": __version__, "strategies": list(strategies)}, parameters=[],
        limit=Limit(TIMEOUT, TOGETHER), doing="doctor",
    )  # fmt: skip
    try:
        latency, rate, largest = _latency_and_rate(opened, device)
        width = WIDTH if WIDTH * WIDTH * 4 / rate < SENDING_SECONDS else NARROW
        repeats = min(MOST_REPEATS, 2 + int(rate * SENDING_SECONDS / (width * width * 4)))
        work = {text: _work(opened, ledger, device, text, width, repeats) for text in strategies}
        return MeasuredLink(opened.scopes.world, latency, rate, largest, work)
    finally:
        opened.lane.close()


def _latency_and_rate(opened: Opened, device: torch.device) -> tuple[float, float, int]:
    """Latency, bytes per second and the largest size, by the times of the slowest rank: so all ranks have the
    same figures and stop together."""

    def slowest(seconds: float) -> float:
        return float(_reduce(opened, _Probe("max"), torch.tensor([seconds], device=device)))

    small = torch.zeros(SMALL, device=device)
    latency = slowest(statistics.median(_seconds(opened, small) for _ in range(TIMES_SMALL)))
    numel = FIRST
    while True:
        flat = torch.zeros(numel, device=device)
        _seconds(opened, flat)  # the first one includes the page faults of a new tensor
        if slowest(_seconds(opened, flat)) >= LONG_ENOUGH or numel >= LARGEST:
            break
        numel *= 4
    middle = slowest(statistics.median(_seconds(opened, flat) for _ in range(REPEATS)))
    sent = wire_bytes("all_reduce", numel * 4, opened.scopes.world)
    return latency, sent / max(middle - latency, 1e-9), numel * 4


def _work(opened: Opened, ledger: Ledger, device: torch.device, text: str, width: int, repeats: int) -> float:
    """Seconds per element of a strategy's own work: before, between and after its requests."""
    names = ("comm/encode_seconds", "comm/decode_seconds")
    least = math.inf
    strategy = parse(text)
    for _ in range(repeats):  # the first one allocates its buffers
        gradient = torch.randn(width, width, device=device)
        before = ledger.metrics()
        _reduce(opened, strategy, gradient.view(-1), gradient.shape)
        after = ledger.metrics()
        least = min(least, sum(after[name] - before[name] for name in names))
    return least / width**2


def _seconds(opened: Opened, flat: Tensor) -> float:
    began = time.perf_counter()
    _reduce(opened, _Probe("sum"), flat)
    if flat.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def _reduce(opened: Opened, strategy: Strategy, flat: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Reduce one bucket, without the message that ends a step."""
    bucket = Bucket(
        flat=flat,
        layout=(Slot("probe", flat.shape if shape is None else shape),),
        step=0,
        rank=opened.scopes.rank,
        world=opened.scopes.world,
        is_last=False,
    )
    future = opened.lane.submit(strategy, bucket)
    opened.lane.drain()
    if (failure := opened.lane.take_failure()) is not None:
        raise failure
    return future.wait()
