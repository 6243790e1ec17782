"""n ranks as processes of this machine: for the demo, benchmarks, tests and first experiments."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .end import shutdown
from .errors import GradlaneError, InvalidValue, WrongState
from .lane.thread import living_lanes

Report = Callable[[object], None]


class RankFailed(GradlaneError, RuntimeError):
    """A rank raised, died, or did not finish in time; the message holds every rank's story."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: object,
    deadline: float = 60.0,
    on_report: Report | None = None,
    init: bool = True,
    environment: Callable[[int], dict[str, str]] | None = None,
) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world`` forked processes; their results, in rank order.

    Each is in a Gloo process group of its own store, unless ``init`` is False: then the function
    gets a path for a file store as ``args[0]`` and does that itself. ``local.tell(x)`` inside calls
    ``on_report(x)`` here. Past the deadline every rank says what its lanes wait for, and is killed.
    """
    if world < 1:
        raise InvalidValue(f"world={world} has no ranks; use 1 or more")
    if not hasattr(os, "fork"):
        raise WrongState("local ranks need fork, which this system has not; use torchrun")
    import_module("torch._dynamo")  # DDP's constructor would, for a second of CPU in every rank
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="gradlane-") as folder:
        store = str(Path(folder) / "store")
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                setting = environment(rank) if environment else {}
                job = (function, args, rank, world, store, theirs, deadline, init, setting)
                process: BaseProcess = context.Process(
                    target=_rank, args=job, name=f"rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collected(processes, pipes, deadline, on_report)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collected(
    processes: list[BaseProcess], pipes: list[Connection], deadline: float, on_report: Report | None
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + deadline + 5  # the ranks watch the deadline themselves
    while open_pipes and (left := end - time.monotonic()) > 0:
        for ready in wait(list(open_pipes), timeout=left):
            assert isinstance(ready, Connection)
            rank = open_pipes[ready]
            try:
                kind, value = pickle.loads(ready.recv_bytes())  # from our own child
            except EOFError:
                del open_pipes[ready]
                processes[rank].join(5)
                if rank not in results and rank not in failures:
                    failures[rank] = f"ended with exit code {processes[rank].exitcode}"
                continue
            if kind == "result":
                results[rank] = value
            elif kind == "failure":
                failures[rank] = value
                end = min(end, time.monotonic() + 10)  # the others should notice soon
            elif on_report is not None:
                on_report(value)
    failures |= {rank: "did not finish" for rank in open_pipes.values() if rank not in results}
    if failures:
        stories = "\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures))
        raise RankFailed(f"{len(failures)} of {len(processes)} ranks failed\n{stories}")
    return [results[rank] for rank in range(len(processes))]


_pipe: Connection | None = None


def tell(value: object) -> None:
    """From inside a rank: hand a value to ``on_report`` of the process that started it."""
    if _pipe is not None:
        _pipe.send_bytes(pickle.dumps(("report", value)))


def _rank(
    function: Callable[..., Any],
    args: tuple[object, ...],
    rank: int,
    world: int,
    store: str,
    pipe: Connection,
    deadline: float,
    init: bool,
    setting: dict[str, str],
) -> None:
    global _pipe
    _pipe = pipe
    os.environ.update(setting)
    torch.set_num_threads(1)
    watch = threading.Timer(deadline, _too_late, (rank, deadline))
    watch.daemon = True
    watch.start()
    try:
        if init:
            dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
            result = function(rank, *args)
            shutdown()
        else:
            result = function(rank, store, *args)
        message = ("result", result)
    except BaseException:  # noqa: BLE001  the parent raises it
        message = ("failure", traceback.format_exc())
    with contextlib.suppress(OSError):  # the parent may have given up
        pipe.send_bytes(pickle.dumps(message))
    pipe.close()


def _too_late(rank: int, deadline: float) -> None:
    for lane in living_lanes():
        print(f"rank {rank} after {deadline:g} s: {lane.where()}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(124)
