"""What a session saves and loads: the step, its buckets, and the memory of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..agree.board import Board
from ..agree.limits import Limit, checked_timeout
from ..checkpoint.load import fitting_of, in_short, load
from ..checkpoint.save import save
from ..checkpoint.subject import Parameter, Subject, as_layout, slots_of
from ..core.ownership import Ownership
from ..core.strategy import Strategy, named_states
from ..core.unsaved_state import refuse_unsaved_state
from ..errors import InvalidValue
from ..feed.step import Step
from ..strategies.ledgers import keep_ledgers
from ..strategies.text import describe, saved_by
from ..telemetry.ledger import Ledger

FORMAT = 2  # of state_dict


class SessionState:
    """The parts of ``Session`` behind ``save``, ``load``, ``state_dict`` and ``load_state_dict``."""

    def __init__(
        self, step: Step, board: Board, parameters: list[Parameter], ownership: Ownership, ledger: Ledger
    ) -> None:
        self._step = step
        self._ledger = ledger
        self._board = board
        self._parameters = parameters
        self._ownership = ownership

    def save(
        self,
        strategy: Strategy,
        folder: Path,
        timeout: float | timedelta | None,
        next_layout: Callable[[], list[list[str]]],
    ) -> None:
        board = self._board_for("save", timeout)
        self._step.finish()
        save(board, folder, self._subject(strategy), next_layout)

    def load(self, strategy: Strategy, folder: Path, strict: bool, timeout: float | timedelta | None) -> None:
        self._ownership.used = True
        with keep_ledgers(strategy):
            loaded = load(self._board_for("load", timeout), folder, self._subject(strategy), strict)
        self._step.go_to(loaded.step, loaded.layout)
        self._ledger.go_on(loaded.totals)

    def state_dict(self, strategy: Strategy) -> dict[str, Any]:
        self._step.finish()
        refuse_unsaved_state(strategy)
        return {
            "format": FORMAT,
            "step": self._step.next,
            "strategy": describe(strategy, shared_only=True),
            "layout": self._step.layout(),
            "state": strategy.state_dict(),
        }

    def load_state_dict(self, strategy: Strategy, state: Mapping[str, Any]) -> None:
        _check(strategy, state)
        try:
            layout = as_layout(state.get("layout", []))
        except ValueError as error:
            raise InvalidValue(f"{error}; pass what state_dict() gave") from None
        self._ownership.used = True
        self._load_memory(strategy, state["state"])
        self._step.go_to(state["step"], layout)

    def _board_for(self, doing: str, timeout: float | timedelta | None) -> Board:
        seconds = checked_timeout(timeout) or self._board.timeout
        return self._board.allowing(
            Limit(seconds, f"give this call more time on all ranks: {doing}(folder, timeout=3600)")
        )

    def _subject(self, strategy: Strategy) -> Subject:
        text = describe(strategy, shared_only=True)
        totals = self._ledger.totals()
        return Subject(strategy, text, self._step.next, self._parameters, self._step.layout(), totals)

    def load_state(self, strategy: Strategy, state: Mapping[str, Any], step: int) -> None:
        """All of a state that came another way than from a folder of ``save``."""
        self._ownership.used = True
        self._load_memory(strategy, state)
        self._step.go_to(step)

    def _load_memory(self, strategy: Strategy, state: object) -> None:
        """All of it, or nothing."""
        if not isinstance(state, Mapping):
            raise InvalidValue(f"the state is a {type(state).__name__}; pass what state_dict() gave")
        wrong = fitting_of(list(named_states(strategy)), state, slots_of(self._parameters))[1]
        if wrong:
            raise InvalidValue(f"{in_short(wrong)}; pass what state_dict() gave for the same model")
        before = strategy.state_dict()
        try:
            with keep_ledgers(strategy):
                strategy.load_state_dict(state)
        except Exception:
            strategy.load_state_dict(before)
            raise


def _check(strategy: Strategy, state: Mapping[str, Any]) -> None:
    if missing := {"format", "step", "strategy", "state"} - set(state):
        raise InvalidValue(f"the state lacks {', '.join(sorted(missing))}; pass what state_dict() gave")
    if state["format"] not in (1, FORMAT):
        raise InvalidValue(f"the state has format {state['format']}, this version reads 1 and {FORMAT}")
    if not saved_by(strategy, str(state["strategy"])):
        own = describe(strategy, shared_only=True)
        raise InvalidValue(
            f"the state was saved by {state['strategy']}, this attachment runs {own}; attach the strategy "
            "that saved it, and swap() afterwards if you want another"
        )
    if type(state["step"]) is not int or state["step"] < 0:
        raise InvalidValue(f"the state is in step {state['step']!r}; a step is a whole number from 0 up")
