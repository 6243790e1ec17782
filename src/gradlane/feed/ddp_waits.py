"""DDP's own collectives, outside of the lane: buckets in the second forward, buffers in each, ``join``.

They are torch's, on the model's process group, and wait for its timeout without a word. Here is who watches
them: the lane's thread while it has nothing to do. The stack of the training thread tells where DDP waits.
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
from ..lane.watchdog import FORWARD, Place, watch
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
"""What is in Gloo's errors: its files, mostly, which are in no other error of DDP's."""


class DdpWaits:
    """Of one model: who is late to them is logged, they end after the limit, and in a lost peer if they fail.

    It keeps neither the model nor who counts its steps.
    """

    def __init__(
        self, ddp: DistributedDataParallel, lane: ThreadLane, step: Step, *, limit: Limit, of_group: Limit
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._lane = lane
        self._step = weakref.ref(step)
        self._shorter = limit.seconds < of_group.seconds  # else the group ends its waits itself
        self._limit = limit if self._shorter else of_group
        self._trainer = threading.get_ident()
        self._inside = False  # of what can be told from other code by where it begins and ends
        self._seen: Place | None = None
        self._since = 0.0
        self._watching = False

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Something of DDP's that has collectives in it. A connection that breaks is a lost peer."""
        self._trainer = threading.get_ident()
        self._inside = True
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in BROKEN):
                raise
            where = f"{Place(self._next_step(), -1, FORWARD, '')}, {_doing(_frames_of(error))}"
            raise self._lane.lost_elsewhere(where, error, self._limit, self._sever) from error
        finally:
            self._inside = False

    def would_hang(self, failure: BaseException) -> bool:
        """Whether DDP would wait, at the end of this backward, for a rank that is lost: it compares then
        which parameters were used. That is ended here, and the model is of no more use."""
        ddp = self._ddp()
        if ddp is None or not isinstance(failure, PeerLost):
            return False
        if ddp.static_graph or not ddp.find_unused_parameters:
            return False
        self._sever()
        return True

    def look(self) -> None:
        """If DDP waits, say who is late until it does so no more; and end it when it has waited too long."""
        place, now = self.place(), time.monotonic()
        if place != self._seen:
            self._seen, self._since = place, now
        if place is None:
            return
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="gradlane-late", daemon=True).start()
        if self._shorter and now - self._since > self._limit.seconds:
            self._since = now
            self._sever()

    def place(self) -> Place | None:
        ddp = self._ddp()
        if ddp is None or not (self._inside or in_join(ddp)):
            return None
        doing = _doing(_outwards(sys._current_frames().get(self._trainer)))
        return None if doing is None else Place(self._next_step(), -1, FORWARD, doing)

    def _watch(self) -> None:
        over = threading.Event()

        def where() -> Place | None:
            if (place := self.place()) is None:
                over.set()
            return place

        try:
            watch(self._lane.board, where, over)
        finally:
            self._watching = False

    def _sever(self) -> None:
        """Close the connections of DDP's own group, here and for all who wait for this rank there: else they
        would wait for the group's own timeout."""
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
    """What the first of these frames that is DDP's own communication does."""
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
