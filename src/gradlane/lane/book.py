"""What a feed and its lane write down. The ledger of ``report`` is one."""

from __future__ import annotations

from typing import Protocol

from ..core.events import StepTimes
from .base import Listener


class Book(Listener, Protocol):
    def gradient(self, raw_bytes: int, dense_wire_bytes: int, last: bool) -> None: ...
    def skipped(self) -> None: ...
    def step_ended(self, times: StepTimes) -> None: ...
