"""Work that shares links and some cores, as a fluid: every share changes when something begins or ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

TINY = 1e-12  # seconds


@dataclass(eq=False)
class Signal:
    """Something that a process can wait for."""

    done: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list, repr=False)


@dataclass(eq=False)
class Work(Signal):
    """Seconds of work at full speed. It keeps ``cores`` busy while it runs at that speed."""

    left: float = 0.0
    cores: float = 0.0
    line: Hashable | None = None
    """Of work that needs a link: its queue there. Work of one queue runs in order, unless it is None."""
    link: str | None = None
    """The link that it needs."""


Process = Generator[Signal, None, None]


class Fluid:
    """Runs processes to their end. A process is a generator that yields what it waits for.

    Work on a link shares it in equal parts. Cores are shared so that nobody who needs less than a fair
    share has to wait, as the scheduler of an operating system does it.
    """

    def __init__(self, cores: float) -> None:
        self.now = 0.0
        self.busy: defaultdict[str | None, float] = defaultdict(float)
        """Seconds in which each link was in use."""
        self._cores = cores
        self._active: list[Work] = []

    def start(self, process: Process) -> Signal:
        """The signal that the process has ended."""
        end = Signal()
        self._step(process, end)
        return end

    def add(self, work: Work) -> Work:
        if work.left <= TINY:
            self.give(work)
        else:
            self._active.append(work)
        return work

    def give(self, signal: Signal) -> None:
        signal.done = True
        waiting, signal.waiting = signal.waiting, []
        for resume in waiting:
            resume()

    def run(self) -> float:
        """Until nothing is left to do; the time at the end."""
        while self._active:
            speeds = self._speeds()
            until = min(
                (work.left / speed for work, speed in zip(self._active, speeds, strict=True) if speed),
                default=inf,
            )
            self.now += until
            for link in {work.link for work in self._active}:
                self.busy[link] += until
            ended = []
            for work, speed in zip(self._active, speeds, strict=True):
                work.left -= speed * until
                if work.left <= TINY:
                    ended.append(work)
            self._active = [work for work in self._active if work.left > TINY]
            for work in ended:
                self.give(work)
        return self.now

    def _step(self, process: Process, end: Signal) -> None:
        for signal in process:
            if not signal.done:
                signal.waiting.append(lambda: self._step(process, end))
                return
        self.give(end)

    def _speeds(self) -> list[float]:
        heads: set[Hashable] = set()
        speeds: list[float] = []
        for work in self._active:
            waits = work.line is not None and work.line in heads
            if work.line is not None:
                heads.add(work.line)
            speeds.append(0.0 if waits else 1.0)
        sharing = Counter(work.link for work, speed in zip(self._active, speeds, strict=True) if speed)
        for index, work in enumerate(self._active):
            if work.link is not None:
                speeds[index] /= max(sharing[work.link], 1)
        needs = [work.cores * speed for work, speed in zip(self._active, speeds, strict=True)]
        if sum(needs) <= self._cores:
            return speeds
        shares = fair_shares(needs, self._cores)
        return [
            speed * share / need if need else speed
            for speed, share, need in zip(speeds, shares, needs, strict=True)
        ]


def fair_shares(needs: Sequence[float], whole: float) -> list[float]:
    """Max-min fair: whoever needs less than an equal share gets it, the others share the rest equally."""
    shares = [0.0] * len(needs)
    left, count = whole, len(needs)
    for index in sorted(range(len(needs)), key=needs.__getitem__):
        shares[index] = min(needs[index], left / count)
        left -= shares[index]
        count -= 1
    return shares
