"""The rank's side of ``Ranks``: what runs in each of its processes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..lane.base import open_lanes
from ..teardown import shutdown
from .family import Family, die_with_parent


class Job(NamedTuple):
    """What a rank runs, and how."""

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


def run_rank(job: Job, pipe: Connection, others: list[Connection]) -> None:
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


def _init(job: Job) -> None:
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
    lanes = "; ".join(lane.where() for lane in open_lanes())
    print(f"rank {rank} after {seconds:g} s: {lanes}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    _send("failure", f"did not finish within {seconds:g} s{'; its lane: ' if lanes else ''}{lanes}")
    os._exit(124)
