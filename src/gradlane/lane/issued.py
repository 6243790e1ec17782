"""A request under way, and where its time goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ..core.events import Event, Timing
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
