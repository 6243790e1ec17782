"""Watches DDP's own collectives: rebuilt buckets in the second forward, buffers in each forward, ``join``.

The stack of the training thread shows where DDP waits.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch.nn.parallel import DistributedDataParallel

from ..agree.limits import Limit
from ..errors import PeerLost
from ..lane.perform import sever
from ..lane.thread import ThreadLane
from ..torch_internals import (
    COMMUNICATING_FILES,
    COMMUNICATING_FUNCTIONS,
    backend_of_group,
    in_join,
    unwrap_pre_forward,
    wrap_pre_forward,
)
from .step import Step
from .torch_waits import TorchWaits


class DdpWaits(TorchWaits):
    """The collectives of one DDP model."""

    def __init__(
        self, ddp: DistributedDataParallel, lane: ThreadLane, step: Step, *, limit: Limit, of_group: Limit
    ) -> None:
        super().__init__(lane, step, limit=limit, of_group=of_group)
        self._ddp = weakref.ref(ddp)

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

    def _doing(self, error: BaseException | None = None) -> str | None:
        if error is not None:
            return _communication(_frames_of(error))
        ddp = self._ddp()
        if ddp is None or not (self._inside or in_join(ddp)):
            return None
        return _communication(_outwards(sys._current_frames().get(self._trainer)))

    def _sever(self) -> None:
        if (ddp := self._ddp()) is not None:
            sever(backend_of_group(ddp.process_group, torch.device("cpu")))


def watch_over(ddp: DistributedDataParallel, waits: DdpWaits) -> Callable[[], None]:
    """Watch what DDP does before each forward; call the returned function to stop that."""
    model = weakref.ref(ddp)

    def undo() -> None:
        if (ddp := model()) is not None:
            unwrap_pre_forward(ddp)

    wrap_pre_forward(ddp, waits.during)
    return undo


def _communication(frames: Iterator[FrameType]) -> str | None:
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
