"""Ranks as forked processes of this machine, with a pipe to each."""

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
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ..ending import shutdown
from ..errors import InvalidValue, WrongState
from ..lane.base import living_lanes
from .family import Family, die_with_parent


class Message(NamedTuple):
    rank: int
    kind: Literal["result", "failure", "report"]
    value: Any


class Ranks:
    """``function(rank, *args)`` in ``world`` processes; ``close`` ends those that still run.

    The ranks form a Gloo process group. With ``init=False`` they do not: the function gets a path for a file
    store as ``args[0]`` and initialises the group itself. ``prepare(rank)`` runs in the process before
    anything else. The ranks, and all processes that they start (such as the workers of a ``DataLoader``), end
    with this process, however it ends.
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
            raise WrongState("local ranks need fork, which this system does not have; use torchrun")
        import_module("torch._dynamo")  # else DDP's constructor does it in every rank, for a second of CPU
        context = multiprocessing.get_context("fork")
        self._resources = contextlib.ExitStack()
        store = _store_path(self._resources)
        self._family = Family()
        self._resources.callback(self._family.end)
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._open: dict[Connection, int] = {}
        self._reported: set[int] = set()  # ranks that sent a result or a failure
        self._finished: set[int] = set()  # those that sent a result
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                job = _Job(function, args, rank, world, store, init, deadline, prepare, self._family)
                process = context.Process(
                    target=_rank, args=(job, theirs, list(self._pipes)), name=f"rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self._open[ours] = rank
        except BaseException:
            self.close()
            raise

    def send(self, order: object) -> None:
        """Send an order to every rank: the next value of ``orders()`` there. None ends them."""
        message = pickle.dumps(order)
        for pipe in self._open:
            with contextlib.suppress(OSError):  # it died; reading its pipe will show that
                pipe.send_bytes(message)

    def messages(self, until: float) -> Iterator[Message]:
        """The messages of the ranks, until all have ended or the time ``until`` has come."""
        while self._open and (remaining := until - time.monotonic()) > 0:
            for ready in wait(list(self._open), timeout=remaining):
                assert isinstance(ready, Connection)
                rank = self._open[ready]
                try:
                    kind, value = pickle.loads(ready.recv_bytes())  # from our own child
                except (EOFError, OSError):
                    del self._open[ready]
                    if rank not in self._reported:
                        yield Message(rank, "failure", self._end_of(rank))
                    continue
                if kind != "report":
                    self._reported.add(rank)
                if kind == "result":
                    self._finished.add(rank)
                yield Message(rank, kind, value)

    def unfinished(self) -> list[int]:
        return [rank for rank in self._open.values() if rank not in self._reported]

    def close(self) -> None:
        """End all ranks that still run. A second call does nothing."""
        for rank, process in enumerate(self.processes):
            process.join(5 if rank in self._finished else 0)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()  # or its descriptor would stay open until garbage collection
        self.processes.clear()
        self._open.clear()
        for pipe in self._pipes:
            pipe.close()
        self._resources.close()

    def _end_of(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(5)
        code = process.exitcode
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _store_path(resources: contextlib.ExitStack) -> str:
    """The file of the ranks' store. On Linux it has no name, so that it cannot be left behind."""
    if sys.platform == "linux":
        file = os.memfd_create("gradlane-store")
        resources.callback(os.close, file)
        return f"/proc/self/fd/{file}"  # the ranks inherit it
    return str(Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="gradlane-"))) / "store")


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


_pipe: Connection | None = None


def tell(value: object) -> None:
    """In a rank: send a value to the process that started it."""
    _send("report", value)


def orders() -> Iterator[Any]:
    """In a rank: the orders of the process that started it, until it sends None."""
    assert _pipe is not None
    while (order := pickle.loads(_pipe.recv_bytes())) is not None:
        yield order


@contextlib.contextmanager
def ending_after(seconds: float | None, rank: int) -> Iterator[None]:
    """After this time, report what the lanes wait for, on stderr and to the parent, and end this process."""
    watch = threading.Timer(seconds or 0.0, _too_late, (rank, seconds))
    watch.daemon = True
    if seconds is not None:
        watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _rank(job: _Job, pipe: Connection, others: list[Connection]) -> None:
    global _pipe
    _pipe = pipe
    for other in others:
        other.close()  # the parent's ends; or the pipe of a dead sibling would never close
    _join_family(job.family)
    gc.freeze()  # or each garbage collection would go through all objects of torch that the parent made
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends the ranks
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
    pipe.close()


def _init(job: _Job) -> None:
    store = dist.FileStore(job.store, job.world)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world)
    # A rank that fails at once must not close its connections while another is still connecting.
    store.set(f"connected/{job.rank}", "yes")
    store.wait([f"connected/{rank}" for rank in range(job.world)])


def _send(kind: str, value: object) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):  # the parent may have stopped reading
            _pipe.send_bytes(pickle.dumps((kind, value)))


def _join_family(family: Family) -> None:
    parent = os.getppid()
    family.join()
    die_with_parent()
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    # For the parent it stays a daemon, which ends with it; but a daemon may not start children.
    multiprocessing.current_process().daemon = False


def _too_late(rank: int, seconds: float) -> None:
    lanes = "; ".join(lane.where() for lane in living_lanes())
    print(f"rank {rank} after {seconds:g} s: {lanes}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    _send("failure", f"did not finish within {seconds:g} s{'; its lane: ' if lanes else ''}{lanes}")
    os._exit(124)
