"""Watches DDP's own collectives: rebuilt buckets in the second forward, buffers in each forward, ``join``.

They run on the model's process group, outside of the lane, and wait for that group's timeout without a log
line. The lane's thread watches them while it is idle. The stack of the training thread shows where DDP waits.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch.nn.parallel import DistributedDataParallel

from ..agree.limits import Limit
from ..errors import PeerLost
from ..lane.perform import sever
from ..lane.thread import ThreadLane
from ..lane.watchdog import FORWARD, Position, watch
from ..torch_internals import (
    COMMUNICATING_FILES,
    COMMUNICATING_FUNCTIONS,
    backend_of_group,
    in_join,
    unwrap_pre_forward,
    wrap_pre_forward,
)
from .step import Step

BROKEN = ("gloo", "pair closure", "onnection")
"""Parts of Gloo's error messages, mostly of file names, that no other error of DDP contains."""


class DdpWaits:
    """The collectives of one DDP model.

    A rank that is late is logged. A wait ends after the limit, and a broken connection raises ``PeerLost``.
    This object keeps neither the model nor its step alive.
    """

    def __init__(
        self, ddp: DistributedDataParallel, lane: ThreadLane, step: Step, *, limit: Limit, of_group: Limit
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._lane = lane
        self._step = weakref.ref(step)
        self._shorter = limit.seconds < of_group.seconds  # else the group's own timeout ends the wait
        self._limit = limit if self._shorter else of_group
        self._trainer = threading.get_ident()
        self._inside = False  # in code of DDP that may communicate, except for join()
        self._last_position: Position | None = None
        self._since = 0.0
        self._watching = False

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Around code of DDP that may communicate. A broken connection becomes ``PeerLost``."""
        self._trainer = threading.get_ident()
        self._inside = True
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in BROKEN):
                raise
            where = f"{Position(self._next_step(), -1, FORWARD, '')}, {_doing(_frames_of(error))}"
            raise self._lane.ddp_connection_broke(where, error, self._limit, self._sever) from error
        finally:
            self._inside = False

    def would_hang(self, failure: BaseException) -> bool:
        """Whether DDP would wait for a lost rank at the end of this backward, to compare which parameters
        were used. If so, close DDP's connections; the model cannot be used any more."""
        ddp = self._ddp()
        if ddp is None or not isinstance(failure, PeerLost):
            return False
        if ddp.static_graph or not ddp.find_unused_parameters:
            return False
        self._sever()
        return True

    def check(self) -> None:
        """While DDP waits, log which rank is late; end the wait after the limit. On the lane's thread."""
        position, now = self.position(), time.monotonic()
        if position != self._last_position:
            self._last_position, self._since = position, now
        if position is None:
            return
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="gradlane-late", daemon=True).start()
        if self._shorter and now - self._since > self._limit.seconds:
            self._since = now
            self._sever()

    def position(self) -> Position | None:
        ddp = self._ddp()
        if ddp is None or not (self._inside or in_join(ddp)):
            return None
        doing = _doing(_outwards(sys._current_frames().get(self._trainer)))
        return None if doing is None else Position(self._next_step(), -1, FORWARD, doing)

    def _watch(self) -> None:
        over = threading.Event()

        def where() -> Position | None:
            if (position := self.position()) is None:
                over.set()
            return position

        try:
            watch(self._lane.board, where, over)
        finally:
            self._watching = False

    def _sever(self) -> None:
        """Close the connections of DDP's group: ranks that wait for this one would wait for its timeout."""
        if (ddp := self._ddp()) is not None:
            sever(backend_of_group(ddp.process_group, torch.device("cpu")))

    def _next_step(self) -> int:
        step = self._step()
        return -1 if step is None else step.next


def watch_over(ddp: DistributedDataParallel, waits: DdpWaits) -> Callable[[], None]:
    """Watch what DDP does before each forward; call the returned function to stop that."""
    model = weakref.ref(ddp)

    def undo() -> None:
        if (ddp := model()) is not None:
            unwrap_pre_forward(ddp)

    wrap_pre_forward(ddp, waits.during)
    return undo


def _doing(frames: Iterator[FrameType]) -> str | None:
    """What DDP communicates in the first of these frames that belongs to it."""
    for frame in frames:
        doing = COMMUNICATING_FUNCTIONS.get(frame.f_code.co_name)
        if doing is not None and frame.f_code.co_filename.replace("\\", "/").endswith(COMMUNICATING_FILES):
            return doing
    return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames_of(error: BaseException) -> Iterator[FrameType]:
    """The innermost first."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return reversed(frames)
