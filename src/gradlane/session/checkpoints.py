"""``save``, ``load`` and ``state_dict`` of a session."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from ..core.strategy import Strategy
from ..errors import WrongState
from ..feed.step import State, Step
from ..torch_internals import current_backward
from .state import SessionState


class Checkpoints(ABC):
    """The part of ``Session`` that saves what a strategy remembers, between two steps."""

    reopen: ClassVar[str]
    """How to get another session, for the message of a closed one."""
    strategy: Strategy
    _closed: bool
    _step: Step
    _state: SessionState

    @abstractmethod
    def _next_layout(self) -> list[list[str]]:
        """The buckets of the next step. Collective."""

    def save(self, path: str | os.PathLike[str], *, timeout: float | timedelta | None = None) -> None:
        """Write a checkpoint: a folder with one file per rank. Call it on every rank, between the same steps.

        It holds the step and the memory of the strategy; model and optimizer are yours to save. A crash at
        any point leaves the old checkpoint in that folder, or the new one. If a rank cannot write, all ranks
        raise ``NotSaved``. See docs/checkpoints.md. It also works after ``close``, as long as the process
        group has its store.

        The ranks wait for each other, for ``timeout`` seconds if that differs from the timeout in training:
        a rank may still be saving the model.
        """
        self._must_be_between_steps("save")
        self._state.save(self.strategy, Path(path), timeout, self._next_layout)

    def load(
        self, path: str | os.PathLike[str], strict: bool = True, *, timeout: float | timedelta | None = None
    ) -> None:
        """Continue where ``save`` was called, with any number of ranks. Call it on every rank.

        Each rank checks everything it reads before anything changes; if one rank refuses, all do, and name
        it. Another strategy or another model is refused, unless ``strict`` is False: then everything that
        fits by name and shape is loaded, and the log lists the remainder. ``timeout`` is as for ``save``.
        """
        self._must_be_open()
        self._state.load(self.strategy, Path(path), strict, timeout)
        self._loaded()

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's memory: tensors, numbers and strings only. Each rank has its own."""
        if current_backward() is not None:  # a step whose backward stopped is ended instead
            self._must_be_between_steps("state_dict")
        return self._state.state_dict(self.strategy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called, on the same rank of as many ranks; the state of another
        strategy is refused. ``load`` can do more."""
        self._must_be_open()
        self._state.load_state_dict(self.strategy, state)
        self._loaded()

    def _loaded(self) -> None:  # noqa: B027  most sessions have nothing to do
        """The state of the strategy is another one now."""

    def _must_be_open(self) -> None:
        if self._closed:
            raise WrongState(f"this attachment is closed; {self.reopen}")

    def _must_be_between_steps(self, doing: str) -> None:
        if self._step.state is State.BEGUN:
            raise WrongState(f"{doing} in the middle of a step; call it between two steps")
