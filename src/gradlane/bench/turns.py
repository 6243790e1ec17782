"""Arms that take turns, step by step: whatever else the machine does hits them alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from .crew import ArmFailed, Crew


class Turns:
    """One crew for each arm. An arm that fails is ended and kept in ``failed``; the others go on."""

    def __init__(self, arms: Sequence[str], start: Callable[[str], Crew]) -> None:
        self.failed: dict[str, ArmFailed] = {}
        self._arms = tuple(arms)
        self._start = start
        self._crews: dict[str, Crew] = {}
        self._kept = contextlib.ExitStack()

    def __enter__(self) -> Turns:
        for arm in self._arms:
            try:
                crew = self._start(arm)
            except ArmFailed as failure:
                self.failed[arm] = failure
                continue
            except BaseException:
                self._kept.close()
                raise
            self._kept.callback(crew.close)
            self._crews[arm] = crew
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.close()

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._crews)

    def round(
        self,
        number: int,
        order: object = None,
        *,
        patience: float,
        on_turn: Callable[[str], None] = lambda arm: None,
        on_sample: Callable[[str, list[Any]], None],
    ) -> None:
        """One step of every arm that still runs; another arm begins each time."""
        arms = self.running
        first = number % len(arms) if arms else 0
        for arm in arms[first:] + arms[:first]:  # an arm must not always follow the same one
            on_turn(arm)
            try:
                samples = self._crews[arm].step(order, patience, f"in step {number}")
            except ArmFailed as failure:
                self.failed[arm] = failure
                self._crews.pop(arm).close()
            else:
                on_sample(arm, samples)
