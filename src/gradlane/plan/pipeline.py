"""The seconds of one step: compute, the strategy's work, the link and the cores, at one representative rank.

The compute thread runs to a bucket, encodes it in the hook and starts its first request. The lane serves the
buckets in order: it waits for an answer, works, and starts the next request. Then the ranks commit the step.
Requests under way share the link, and those within a node another one. Compute, the lane and the network
share the cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from ..errors import InvalidValue
from .beat import Beat
from .curves import Curves, Transfer
from .fluid import Fluid, Process, Signal, Work
from .work import BucketWork, Phase

COMMIT_BYTES = 24  # of the message that ends a step
BETWEEN = "between"  # the link of a rank, or of a node, to the others
RINGS = 2  # all-reduces of one group that Gloo has under way at the same time


@dataclass(frozen=True)
class Forecast:
    """Of one step."""

    seconds: float
    compute: float
    """Of compute alone."""
    work: float
    """Of the strategy's own work."""
    network: float
    """In which the link to the others was busy."""
    latency: float
    """Of all requests, one after the other."""

    @property
    def exposed(self) -> float:
        """What communication and the strategy's work add to compute."""
        return self.seconds - self.compute


def step_seconds(
    beat: Beat, buckets: Sequence[BucketWork], curves: Curves, *, cores: float, commit: bool
) -> Forecast:
    """``cores`` that one rank has. ``commit``: whether a lane ends the step; DDP without a hook has none."""
    if len(buckets) != beat.buckets:
        raise InvalidValue(
            f"the beat has {beat.buckets} buckets, the strategy's work {len(buckets)}; use the same buckets"
        )
    if not cores > 0:
        raise InvalidValue(f"cores={cores:g} cannot run anything; give the cores of one rank")
    step = _Step(beat, buckets, curves, cores, commit)
    seconds = step.fluid.run()
    if commit and any(bucket.phases for bucket in buckets):
        seconds += beat.beside
    work = sum(bucket.own_s for bucket in buckets)
    return Forecast(seconds, beat.compute, work, step.fluid.busy[BETWEEN], step.latency)


class _Step:
    def __init__(
        self, beat: Beat, buckets: Sequence[BucketWork], curves: Curves, cores: float, commit: bool
    ) -> None:
        self.fluid = Fluid(cores)
        self._beat, self._buckets, self._curves = beat, buckets, curves
        self._commit = commit
        self._submitted = [Signal() for _ in buckets]
        self._answers: list[Signal | None] = [None] * len(buckets)  # to first requests
        self._rings: defaultdict[tuple[str, str], list[Signal]] = defaultdict(list)  # of each group
        self._serial = count()
        self.latency = 0.0
        self.fluid.start(self._compute())
        self.fluid.start(self._lane())

    def _compute(self) -> Process:
        beat = self._beat
        for index, (bucket, pause) in enumerate(zip(self._buckets, (beat.rest, *beat.gaps), strict=True)):
            yield self._busy(pause, beat.cores)
            if bucket.phases and not bucket.phases[0].after_all:
                transfer = self._transfer(bucket.phases[0])
                yield self._busy(bucket.phases[0].encode_s + transfer.issue_s)
                self._answers[index] = self._request(transfer, bucket.phases[0], "first")
            self.fluid.give(self._submitted[index])
        yield self._busy(beat.tail, beat.cores)

    def _lane(self) -> Process:
        waiting: list[tuple[BucketWork, int]] = []
        for index, bucket in enumerate(self._buckets):
            yield self._submitted[index]
            number = 0
            if (answer := self._answers[index]) is not None:
                yield answer
                number = 1
            while number < len(bucket.phases) and not bucket.phases[number].after_all:
                yield from self._later(bucket.phases[number])
                number += 1
            if number < len(bucket.phases):
                waiting.append((bucket, number))
            else:
                yield self._busy(bucket.decode_s)
        for bucket, number in waiting:  # for the sum over the step
            for phase in bucket.phases[number:]:
                yield from self._later(phase)
            yield self._busy(bucket.decode_s)
        if self._commit and any(bucket.phases for bucket in self._buckets):
            yield from self._later(Phase("all_reduce", "world", COMMIT_BYTES, 0.0))

    def _later(self, phase: Phase) -> Process:
        transfer = self._transfer(phase)
        yield self._busy(phase.encode_s + transfer.issue_s)
        yield self._request(transfer, phase, "later")

    def _busy(self, seconds: float, cores: float = 1.0) -> Work:
        return self.fluid.add(Work(left=seconds, cores=cores))

    def _transfer(self, phase: Phase) -> Transfer:
        return self._curves.transfer(phase.kind, phase.over, phase.payload_bytes, phase.dtype)

    def _request(self, transfer: Transfer, phase: Phase, queue: str) -> Signal:
        """The signal that it is answered."""
        self.latency += transfer.latency_s
        ring = phase.kind == "all_reduce"
        rings = self._rings[queue, phase.over]
        earlier = rings[-RINGS] if ring and len(rings) >= RINGS else None
        line = (queue, phase.over, next(self._serial) if ring else None)
        link = "inside" if phase.over == "node" else BETWEEN
        answered = self.fluid.start(self._carry(transfer, earlier, line, link))
        if ring:
            rings.append(answered)
        return answered

    def _carry(
        self, transfer: Transfer, earlier: Signal | None, line: tuple[object, ...], link: str
    ) -> Process:
        if earlier is not None:
            yield earlier
        cores = transfer.cpu_s / transfer.seconds if transfer.seconds > 0 else 0.0
        yield self.fluid.add(Work(left=transfer.latency_s, cores=cores))
        yield self.fluid.add(Work(left=transfer.line_s, cores=cores, line=line, link=link))
