"""A bucket on the lane, and the request of it that is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from torch import Tensor
from torch.futures import Future

from ..core.events import Event, Timing
from ..core.running import Running
from .base import Finish
from .perform import Pending


@dataclass(slots=True)
class Issued:
    pending: Pending
    event: Event
    began: float  # when the strategy turned to this request
    issued: float
    turn: float = 0.0  # when the lane had nothing before it any more
    answered: float = 0.0

    def told(self, *, last: bool) -> Event:
        """The event with its timing, when the strategy has taken the answer: its ``last``, or not."""
        timing = Timing(
            began=self.began,
            encode=self.issued - self.began,
            queued=self.turn - self.issued,
            collective=self.answered - self.turn,
            decode=time.perf_counter() - self.answered if last else 0.0,
        )
        return replace(self.event, timing=timing)


@dataclass(slots=True)
class Job:
    running: Running
    future: Future[Tensor]
    finish: Finish
    loud: bool
    issued: Issued | None = None
    error: BaseException | None = None
