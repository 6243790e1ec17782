"""Runs ranks in which something goes wrong, and holds them to account.

What a fault test needs is here: points drawn from a printed seed, the proof that the fault was there, a
deadline past which every rank says what it waits for, and no process left behind.
"""

import contextlib
import logging
import os
import random
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import gradlane as gl
from gradlane.local.ranks import Ranks

from ..support.leftovers import gone

SEED = int(os.environ.get("FAULT_SEED", "1"))


def drawing(test):
    """Chance for one test; FAULT_SEED=7 draws other points."""
    print(f"{test}: FAULT_SEED={SEED}")
    return random.Random(f"{test} {SEED}")


def drawn_again(seed):
    """The seed of one case, and with FAULT_SEED=7 that of another one of its kind."""
    return 1000 * (SEED - 1) + seed


def connect(rank, path, world, *, timeout=60):
    """A process group whose store rank 0 hosts, as without torchrun: who kills rank 0 kills it too."""
    board = dist.FileStore(path, world)
    host = "127.0.0.1"
    limit = timedelta(seconds=timeout)
    if rank == 0:
        store = dist.TCPStore(host, 0, world, True, limit, wait_for_workers=False)
        board.set("port", str(store.port))
    else:
        store = dist.TCPStore(host, int(board.get("port")), world, False, limit, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    board.set(f"connected/{rank}", "yes")  # nobody may fail while another is still connecting
    board.wait([f"connected/{other}" for other in range(world)])


def leave_the_lost():
    """The end of a rank that has lost a peer: no barrier to wait for."""
    gl.shutdown(timeout=0.2)


class Warnings(logging.Handler):
    """What the library logs in this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("gradlane").addHandler(self)

    def emit(self, record):
        self.lines.append((time.monotonic(), record.getMessage()))


@dataclass
class Story:
    """How a run went."""

    results: dict = field(default_factory=dict)
    failures: dict = field(default_factory=dict)
    reports: list = field(default_factory=list)
    codes: dict = field(default_factory=dict)
    """Exit codes; None: had to be killed."""
    signalled: float | None = None
    """When the parent sent its signal."""
    victim_state: str | None = None
    """Of the process, when the others were done. T: stopped."""

    @property
    def fired(self):
        """When the fault was there."""
        if self.signalled is not None:
            return self.signalled
        times = [report[1] for report in self.reports if report[0] == "fired"]
        assert len(times) == 1, f"the fault fired {len(times)} times"
        return times[0]


class Run:
    """Ranks under a fault; ``story`` is known when all but the ``victim`` are done."""

    def __init__(self, function, world, *args, deadline, victim=None, on_report=None):
        self.story = Story()
        self._victim = victim
        self._on_report = on_report or (lambda run, report: None)
        self._end = time.monotonic() + deadline + 5  # the ranks watch the deadline themselves
        self.ranks = Ranks(function, world, *args, init=False, deadline=deadline)
        self.pids = [process.pid for process in self.ranks.processes]

    def signal(self, rank, what):
        os.kill(self.pids[rank], what)
        if what != signal.SIGCONT:
            self.story.signalled = time.monotonic()

    def ended(self):
        try:
            while self.goes_on(self._end):
                pass
            if self._victim is not None:
                self.story.victim_state = state_of(self.pids[self._victim])
            self._join()
        finally:
            self.ranks.close()
        assert gone(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids), 5)
        return self.story

    def goes_on(self, until):
        """Hear what the ranks say until then; False when there is nothing more to hear."""
        for rank, kind, value in self.ranks.messages(min(until, self._end)):
            if kind == "result":
                self.story.results[rank] = value
            elif kind == "failure":
                self.story.failures[rank] = value
            else:
                self.story.reports.append(value)
                self._on_report(self, value)
            if not self._awaited():
                break
        return bool(self._awaited()) and time.monotonic() < self._end

    def _awaited(self):
        return (
            set(range(len(self.pids))) - {self._victim} - set(self.story.results) - set(self.story.failures)
        )

    def _join(self):
        for rank, process in enumerate(self.ranks.processes):
            if rank in self.story.results or rank in self.story.failures:
                process.join(10)
            elif rank == self._victim:
                process.join(0 if self.story.victim_state == "T" else 1)
            self.story.codes[rank] = process.exitcode


def run(function, world, *args, deadline=60, victim=None, on_report=None):
    return Run(function, world, *args, deadline=deadline, victim=victim, on_report=on_report).ended()


def side_by_side(starts, most):
    """The stories of runs that ``starts`` begin, in their order; ``most`` of them go on at a time, since each
    waits for a lost rank for longer than it works."""
    waiting, going, stories = list(enumerate(starts)), {}, {}
    try:
        while waiting or going:
            while waiting and len(going) < most:
                number, start = waiting.pop(0)
                going[number] = start()
            for number, running in list(going.items()):
                if not running.goes_on(time.monotonic() + 0.01):
                    stories[number] = going.pop(number).ended()
    finally:
        for running in going.values():
            running.ranks.close()
    return [stories[number] for number in sorted(stories)]


def state_of(pid):
    """The letter in /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None
