"""Ranks as forked processes of this machine, with a pipe to each: the side of the parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import InvalidValue, WrongState
from ..torch_internals import load_what_ddp_imports
from .family import Family
from .rank_process import Job, run_rank


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
        load_what_ddp_imports()  # else every rank does, for a second of CPU
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
                job = Job(function, args, rank, world, store, init, deadline, prepare, self._family)
                process = context.Process(
                    target=run_rank, args=(job, theirs, list(self._pipes)), name=f"rank {rank}", daemon=True
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

    def pause(self) -> None:
        """Stop all ranks: idle threads of Gloo wake a hundred times a second, which others would feel."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``pause``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)  # a child that nobody has waited for keeps its id

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
