"""Ranks as forked processes of this machine, with a line to each."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ..errors import InvalidValue, WrongState
from ..lane.base import open_lanes
from ..teardown import shutdown
from ..torch_internals import load_compiler
from .family import Family, die_with_parent


class Message(NamedTuple):
    rank: int
    kind: Literal["result", "failure", "report"]
    value: Any


class Ranks:
    """``function(rank, *args)`` in ``world`` processes; ``close`` ends those that are still there.

    Each is in a Gloo process group of its own store, unless ``init`` is False: then the function
    gets a path for a file store as ``args[0]`` and does that itself. ``prepare(rank)`` runs in the
    process before anything else. They die with this process, however it ends, and so does what they
    have started: they may have children, such as the workers of a ``DataLoader``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world: int,
        *args: object,
        init: bool = True,
        deadline: float | None = None,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        if world < 1:
            raise InvalidValue(f"world={world} has no ranks; use 1 or more")
        if not hasattr(os, "fork"):
            raise WrongState("local ranks need fork, which this system has not; use torchrun")
        load_compiler()  # once, not in every rank
        context = multiprocessing.get_context("fork")
        self._held = contextlib.ExitStack()
        store = _store_path(self._held)
        self._family = Family()
        self._held.callback(self._family.end)
        self.processes: list[BaseProcess] = []
        self._lines: list[Connection] = []
        self._open: dict[Connection, int] = {}
        self._settled: set[int] = set()  # ranks that sent a result or a failure
        self._finished: set[int] = set()  # those that sent a result
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                self._lines.append(ours)
                job = _Job(function, args, rank, world, store, init, deadline, prepare, self._family)
                process = context.Process(
                    target=_rank, args=(job, theirs, list(self._lines)), name=f"rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self._open[ours] = rank
        except BaseException:
            self.close()
            raise

    def send(self, order: object) -> None:
        """To every rank: the next value of ``orders()`` there. None ends them."""
        message = pickle.dumps(order)
        for line in self._open:
            with contextlib.suppress(OSError):  # it died; its line will say so
                line.send_bytes(message)

    def messages(self, until: float) -> Iterator[Message]:
        """What the ranks say, until all have ended or ``time.monotonic()`` passes ``until``."""
        while self._open and (left := until - time.monotonic()) > 0:
            for ready in wait(list(self._open), timeout=left):
                assert isinstance(ready, Connection)
                rank = self._open[ready]
                try:
                    kind, value = pickle.loads(ready.recv_bytes())  # from our own child
                except (EOFError, OSError):
                    del self._open[ready]
                    if rank not in self._settled:
                        yield Message(rank, "failure", self._end_of(rank))
                    continue
                if kind != "report":
                    self._settled.add(rank)
                if kind == "result":
                    self._finished.add(rank)
                yield Message(rank, kind, value)

    def unfinished(self) -> list[int]:
        return [rank for rank in self._open.values() if rank not in self._settled]

    def close(self) -> None:
        """End what is still running. Twice is fine."""
        for rank, process in enumerate(self.processes):
            process.join(5 if rank in self._finished else 0)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()  # or its descriptor would stay until the garbage is collected
        self.processes.clear()
        self._open.clear()
        for line in self._lines:
            line.close()
        self._held.close()

    def _end_of(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(5)
        code = process.exitcode
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _store_path(held: contextlib.ExitStack) -> str:
    """A file for the ranks to meet in. On Linux it has no name, so that no end can leave it behind."""
    if sys.platform == "linux":
        file = os.memfd_create("gradlane-store")
        held.callback(os.close, file)
        return f"/proc/self/fd/{file}"  # the ranks inherit it
    return str(Path(held.enter_context(tempfile.TemporaryDirectory(prefix="gradlane-"))) / "store")


class _Job(NamedTuple):
    function: Callable[..., Any]
    args: tuple[object, ...]
    rank: int
    world: int
    store: str
    init: bool
    deadline: float | None
    prepare: Callable[[int], None] | None
    family: Family


_line: Connection | None = None


def tell(value: object) -> None:
    """From inside a rank: hand a value to the process that started it."""
    _send("report", value)


def orders() -> Iterator[Any]:
    """Inside a rank: what the process that started it sends, until it sends None."""
    assert _line is not None
    while (order := pickle.loads(_line.recv_bytes())) is not None:
        yield order


@contextlib.contextmanager
def ending_after(seconds: float | None, rank: int) -> Iterator[None]:
    """Past the time say what the lanes wait for, on stderr and to the parent, and end this process."""
    watch = threading.Timer(seconds or 0.0, _too_late, (rank, seconds))
    watch.daemon = True
    if seconds is not None:
        watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _rank(job: _Job, line: Connection, others: list[Connection]) -> None:
    global _line
    _line = line
    for other in others:
        other.close()  # the parent's ends; else a dead sibling's line would never end
    _end_with_the_family(job.family)
    gc.freeze()  # what the parent had is not ours to collect: each collection would go through all of torch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends the ranks
    torch.set_num_threads(1)
    with ending_after(job.deadline, job.rank):
        try:
            if job.prepare is not None:
                job.prepare(job.rank)
            if job.init:
                _init(job)
                result = job.function(job.rank, *job.args)
                shutdown()
            else:
                result = job.function(job.rank, job.store, *job.args)
        except BaseException:  # noqa: BLE001  the parent raises it
            _send("failure", traceback.format_exc())
        else:
            _send("result", result)
    line.close()


def _init(job: _Job) -> None:
    store = dist.FileStore(job.store, job.world)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world)
    # A rank that fails at once must not take its connections away from one that is still connecting.
    store.set(f"connected/{job.rank}", "yes")
    store.wait([f"connected/{rank}" for rank in range(job.world)])


def _send(kind: str, value: object) -> None:
    if _line is not None:
        with contextlib.suppress(OSError):  # the parent may have given up
            _line.send_bytes(pickle.dumps((kind, value)))


def _end_with_the_family(family: Family) -> None:
    parent = os.getppid()
    family.join()
    die_with_parent()
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    # To the parent it stays a daemon, ended at its exit; but a daemon may not have children.
    multiprocessing.current_process().daemon = False


def _too_late(rank: int, seconds: float) -> None:
    lanes = "; ".join(lane.where() for lane in open_lanes())
    print(f"rank {rank} after {seconds:g} s: {lanes}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    _send("failure", f"did not finish within {seconds:g} s{'; its lane: ' if lanes else ''}{lanes}")
    os._exit(124)
