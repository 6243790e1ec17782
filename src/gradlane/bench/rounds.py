"""All arms, one step each per round, so that other load on the machine affects them alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from .arm_processes import ArmFailed, ArmProcesses


class Rounds:
    """The processes of all arms. An arm that fails is closed and added to ``failed``; the others continue."""

    def __init__(self, arms: Sequence[str], start: Callable[[str], ArmProcesses]) -> None:
        self.failed: dict[str, ArmFailed] = {}
        self._arms = tuple(arms)
        self._start = start
        self._processes: dict[str, ArmProcesses] = {}
        self._to_close = contextlib.ExitStack()

    def __enter__(self) -> Rounds:
        for arm in self._arms:
            try:
                processes = self._start(arm)
            except ArmFailed as failure:
                self.failed[arm] = failure
                continue
            except BaseException:
                self._to_close.close()
                raise
            self._to_close.callback(processes.close)
            self._processes[arm] = processes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._to_close.close()

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._processes)

    def run(
        self,
        number: int,
        order: object = None,
        *,
        timeout: float,
        on_start: Callable[[str], None] = lambda arm: None,
        on_sample: Callable[[str, list[Any]], None],
    ) -> None:
        """Round ``number``: one step of every arm that still runs. Each round begins with another arm."""
        arms = self.running
        first = number % len(arms) if arms else 0
        for arm in arms[first:] + arms[:first]:
            on_start(arm)
            try:
                samples = self._processes[arm].step(order, timeout, f"in step {number}")
            except ArmFailed as failure:
                self.failed[arm] = failure
                self._processes.pop(arm).close()
            else:
                on_sample(arm, samples)
