"""The time of one collective through the lane: its threads and its groups are part of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import Request, Scope, all_gather, all_reduce, all_to_all
from ..core.strategy import Reduced, Strategy
from ..lane.open import Opened
from ..lane.outside_steps import bucket_of, drain, perform_now
from ..lane.perform import issue
from .curves import DDPS, Primitive

LONG = 0.25  # seconds: a collective that takes longer is repeated once only
SECONDS = 0.15  # for the repeats of one size
REPEATS = 9  # at most


@dataclass(frozen=True)
class Times:
    """Of one collective, as the slowest rank saw it."""

    issue: float
    seconds: float
    """From the end of the issue to the answer."""
    cpu: float
    """Of all threads of a rank, the issue aside."""


@dataclass
class _Probe(Strategy):
    primitive: Primitive
    over: Scope
    op: Literal["sum", "max"] = "sum"

    async def reduce(self, bucket: Bucket) -> Reduced:
        flat = bucket.flat
        if self.primitive == "all_reduce":
            return Reduced(await all_reduce(flat, op=self.op, over=self.over, exact=True))
        if self.primitive == "all_gather":
            await all_gather((flat,), over=self.over)
        else:
            parts = flat.view(bucket.sizes[self.over], -1)
            await all_to_all([(part,) for part in parts], over=self.over)
        return Reduced(flat)


@dataclass(frozen=True)
class Prober:
    """All ranks of the lane call it alike, while nothing else runs; all ranks get the same times."""

    opened: Opened
    device: torch.device
    ddp_group: Any = None
    """The group on which DDP reduces, for its curve."""

    def together(self) -> None:
        """Wait until all ranks are here."""
        self._slowest(Times(0.0, 0.0, 0.0))

    def at_most(self, count: int) -> int:
        """The least count of all ranks."""
        return -int(self._slowest(Times(0.0, -float(count), 0.0)).seconds)

    def times(
        self, primitive: Primitive, over: Scope, elements: int, dtype: torch.dtype = torch.float32
    ) -> Times:
        """Medians, for as many elements."""
        probe = _Probe(primitive, over)
        flat = torch.zeros(elements, device=self.device, dtype=dtype)
        first = self._time(probe, flat)  # also: buffers are allocated, connections formed
        slowest = self._slowest(first)  # the same on all ranks, so all repeat alike
        if slowest.seconds + slowest.issue >= LONG:
            again = self._slowest(self._time(probe, flat))
            return min(slowest, again, key=lambda times: times.seconds)
        repeats = max(3, min(REPEATS, int(SECONDS / max(slowest.seconds + slowest.issue, 1e-6))))
        times = [self._time(probe, flat) for _ in range(repeats)]
        return self._slowest(
            Times(
                median(each.issue for each in times),
                median(each.seconds for each in times),
                sum(each.cpu for each in times) / repeats,
            )
        )

    def _time(self, probe: _Probe, flat: Tensor) -> Times:
        cpu, thread = time.process_time(), time.thread_time()
        wait = self._issued(probe, flat)
        issued, thread = time.perf_counter(), time.thread_time() - thread
        wait()
        if flat.device.type != "cpu":
            torch.accelerator.synchronize()
        ended = time.perf_counter()
        return Times(thread, ended - issued, max(time.process_time() - cpu - thread, 0.0))

    def _issued(self, probe: _Probe, flat: Tensor) -> Callable[[], object]:
        """What waits for the answer."""
        if probe.primitive == DDPS:
            request = Request("all_reduce", ((flat,),), "sum", "world")
            return issue(self.ddp_group, request, 1, _no_buffer).wait
        lane = self.opened.lane
        future = lane.submit(probe, bucket_of(flat, self.opened.scopes))

        def wait() -> None:
            drain(lane)
            future.wait()

        return wait

    def _slowest(self, times: Times) -> Times:
        row = torch.tensor([times.issue, times.seconds, times.cpu], device=self.device)
        largest = _Probe("all_reduce", "world", "max")
        return Times(*perform_now(self.opened.lane, self.opened.scopes, largest, row).tolist())


def _no_buffer(peer: int, numel: int) -> Tensor:
    raise AssertionError("an all-reduce receives in place")
