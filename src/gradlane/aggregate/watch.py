"""Naming a rank that is wrong: one that stays far from the others, step after step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.numbers import is_number
from ..core.world_change import Shared
from ..errors import InvalidValue
from ..log import log
from .decision import decide
from .mean import mean
from .rule import check_count

NOTHING = 1e-3  # a rank with less than this share of the median norm sends next to nothing
FEWEST = 3  # ranks; of two nobody can say which is the outlier


@dataclass
class Watch(Shared):
    """Warns of a rank that has been an outlier for ``patience`` steps in a row, and again when it is back.

    An outlier has a median distance to the others of more than ``factor`` times the median over all ranks, or
    sends next to nothing while the others send something. An honest rank with three times the noise of the
    others is at 2.2 times the usual distance, sqrt(1 + 9) / sqrt(1 + 1). A wrong rank whose distance hides
    in the noise of honest gradients is not seen.

    Rank 0 logs a warning, and the rank that it is about. Every step is checked when the next one begins.
    """

    factor: float = 3.0
    patience: int = 20

    def __post_init__(self) -> None:
        check_count(self, "patience", least=1)
        if not is_number(self.factor) or not 1 < self.factor < math.inf:
            raise InvalidValue(f"factor={self.factor!r} would name honest ranks; use more than 1, 3 say")
        self.undoable = False
        self._forget()

    def _forget(self) -> None:
        self._pending: tuple[int, Tensor] | None = None  # a step, and its figures so far
        self._runs: dict[int, list[int]] = {}  # by rank: first step, number of steps, whether it was named
        self._nonfinite: set[int] = set()  # ranks that were non-finite in the last step
        self._before: dict[str, Any] | None = None  # its attributes before the current step

    def keep(self) -> None:
        self._before = None

    def undo(self) -> None:
        """Warnings stay logged; but the figures of all ranks are equal again."""
        vars(self).update(self._before or {})
        self._before = None

    def add(self, step: int, seen: Tensor, nonfinite: Iterable[int], me: int) -> None:
        """Add figures of a step, as ``decide`` reads them, and the ranks that they leave out."""
        if self.undoable and self._before is None:
            runs = {rank: list(run) for rank, run in self._runs.items()}
            self._before = {"_pending": self._pending, "_runs": runs, "_nonfinite": set(self._nonfinite)}
        if self._pending is not None and self._pending[0] == step:
            self._pending = (step, self._pending[1] + seen)
        else:
            if self._pending is not None:
                self._check(*self._pending, me)
            self._pending = (step, seen.clone())
        self._warn_of_nonfinite(step, set(nonfinite), me)

    def _warn_of_nonfinite(self, step: int, nonfinite: set[int], me: int) -> None:
        """Warn at once, and once: not again in later buckets or steps in which they are non-finite."""
        for rank in sorted(nonfinite - self._nonfinite):
            _warn(me, rank, "rank %d sent values that are not finite in step %d and is left out", rank, step)
        self._nonfinite |= nonfinite

    def _check(self, step: int, seen: Tensor, me: int) -> None:
        decision = decide(mean, seen, step)
        self._nonfinite &= set(decision.nonfinite)
        if len(decision.included) < FEWEST:
            return
        far, norms = decision.times_as_far.tolist(), decision.norms
        silent = (norms <= NOTHING * norms.median()) & (norms.median() > 0)
        for rank, times, nothing in zip(decision.included, far, silent.tolist(), strict=True):
            if times > self.factor or nothing:
                self._outlier(step, rank, times, nothing, me)
            elif self._runs.pop(rank, [0, 0, 0])[2]:
                _warn(me, rank, "rank %d is back among the others since step %d", rank, step)

    def _outlier(self, step: int, rank: int, times: float, nothing: bool, me: int) -> None:
        run = self._runs.setdefault(rank, [step, 0, 0])
        run[1] += 1
        if run[1] < self.patience or run[2]:
            return
        run[2] = 1
        how = f"its gradient is {times:.1f} times as far from the others as they are from each other"
        if nothing:
            how = "it sends next to nothing"
        _warn(me, rank, "rank %d has been an outlier since step %d (%s)", rank, run[0], how)

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        if self._pending is not None:
            saved |= {"step": self._pending[0], "seen": self._pending[1].clone()}
        if self._runs:
            saved["runs"] = torch.tensor([[rank, *run] for rank, run in sorted(self._runs.items())])
        if self._nonfinite:
            saved["broken"] = torch.tensor(sorted(self._nonfinite))
        return saved

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Nothing: the numbers of the ranks mean other ranks now."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._forget()
        try:
            if "step" in state:
                self._pending = (int(state["step"]), _square(state["seen"]).clone())
            if "runs" in state:
                self._runs = {
                    rank: [since, steps, named] for rank, since, steps, named in state["runs"].tolist()
                }
            if "broken" in state:
                self._nonfinite = {int(rank) for rank in state["broken"].tolist()}
        except (AttributeError, KeyError, TypeError, ValueError):
            self._forget()
            raise InvalidValue("the state of Watch is damaged; pass what its state_dict() gave") from None


def _square(seen: Tensor) -> Tensor:
    ranks, columns = seen.shape
    if columns != ranks + 1:
        raise ValueError
    return seen


def _warn(me: int, about: int, text: str, *values: object) -> None:
    if me in (0, about):
        log.warning(text, *values)
