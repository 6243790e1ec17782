"""Time that passes in steps alone: arms that take turns wait for each other between them."""

from __future__ import annotations

import time


class Stopwatch:
    """A clock that stands still while it is stopped."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._started: float | None = None

    def __call__(self) -> float:
        return self._passed + (0.0 if self._started is None else time.perf_counter() - self._started)

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._passed, self._started = self(), None
