"""A strategy at work on a model: what an ``Attachment`` and a ``Reducer`` have in common."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ._version import __version__
from .admission import objection_to
from .agree.board import Board, Document
from .agree.compare import as_note, refuse_differences, refuse_objections
from .agree.limits import Limit, checked_timeout, limit_of
from .checkpoint.load import fitting_of, in_short, load
from .checkpoint.save import save
from .checkpoint.subject import Subject, as_layout, parameters_of, slots_of
from .core.one_model import claim, exclusive_states
from .core.ownership import Ownership
from .core.strategy import Strategy, named_states, shared_state
from .core.unsaved_state import refuse_unsaved_state, unsaved_state
from .errors import InvalidValue, WrongState
from .feed.base import Feed
from .feed.drift import DriftCheck
from .feed.loss_scale import Scaler, checked_scaler
from .feed.nonfinite import Guard
from .feed.withhold import Withheld
from .lane.base import Lane, wait_for_the_leaving
from .lane.open import Opened, open_lane
from .log import log
from .settings import Settings
from .strategies.as_strategy import as_strategy
from .strategies.ledgers import follow, keep_ledgers
from .strategies.route import warn_of_unmatched
from .strategies.text import describe, saved_by
from .swapped import moved_over
from .telemetry.ledger import Ledger
from .telemetry.sink import RunInfo

FORMAT = 2  # of state_dict

Self = TypeVar("Self", bound="Session")

_open: weakref.WeakSet[Session] = weakref.WeakSet()


class Session(ABC):
    """From the moment the ranks have agreed until ``close``; also a context manager that closes.

    What is dropped with its ``owner``, the model, and was not closed, ends by itself a moment later: its
    thread and its connections go. No rank waits for another then.
    """

    kind: ClassVar[str]
    """What it is, in messages; and how to get another one."""
    again: ClassVar[str]

    def __init__(
        self,
        owner: nn.Module,
        module: nn.Module,
        group: Any,
        device: torch.device,
        strategy: Strategy,
        settings: Settings,
        *,
        doing: str,
        must_agree: Document,
    ) -> None:
        self.strategy = strategy
        self.settings = settings
        self._closed = False
        self._module = weakref.ref(module)  # the model must be free to go before its process group does
        self._ledger = Ledger(settings.observers)
        self._parameters = parameters_of(module)
        self._ownership = Ownership(self, module)
        self._looked = False  # for state that has come up in the wrong place
        warn_of_unmatched(strategy, self._parameter_names())
        run = RunInfo(group.rank(), group.size(), describe(strategy))
        with self._ledger.opening(run) as ready:  # a file that cannot be written is told to all ranks
            opened = open_lane(
                group,
                device,
                self._ledger,
                {
                    "version": __version__,
                    "strategy": describe(strategy, shared_only=True),
                    "nonfinite": settings.nonfinite,
                    "verify_every": settings.verify_every,
                    **must_agree,
                    "observer": ready,
                },
                parameters=list(map(str, self._parameters)),
                limit=limit_of(settings.timeout, group, device),
                ranks_per_node=settings.ranks_per_node,
                objection=objection_to(strategy, module, group.size()),
                doing=doing,
            )
        claim(strategy, self._ownership)
        self._board = opened.board
        # For those who drop the model, and close nothing: its end is the lane's.
        self._unless_closed = weakref.finalize(owner, _model_went, weakref.ref(self), opened.lane)
        self._unless_closed.atexit = False  # there is ``close_all`` then
        self._world = opened.sizes["world"]
        self._swaps = 0
        self._withheld = Withheld(module.named_parameters(), _weakly(self._synced))
        self._feed = self._fed(opened, Guard(settings.nonfinite, opened.lane.check, self._withheld))
        self._feed.scaler = settings.scaler
        self._began = self._feed.step
        if settings.verify_every is not None:
            self._feed.drift = DriftCheck(
                settings.verify_every, opened.lane, opened.rank, opened.sizes["world"],
                weights=self._alike, state=lambda: shared_state(self.strategy),
            )  # fmt: skip
        _open.add(self)
        log.info("%s: %s on %d ranks", doing, describe(strategy, short=True), opened.sizes["world"])

    @abstractmethod
    def _fed(self, opened: Opened, guard: Guard) -> Feed: ...

    def _synced(self) -> bool:
        """Whether a backward under way ends with the mean of all ranks."""
        return True

    def _alike(self) -> dict[str, Tensor]:
        """The weights that are the same on all ranks; buffers may differ on purpose."""
        module = self._module()
        return {} if module is None else dict(module.named_parameters())

    def _layout_to_come(self) -> list[list[str]]:
        """The buckets of the next step; all ranks ask together."""
        return self._feed.layout()

    @property
    def step(self) -> int:
        """The step that is next; counts those with synchronisation only."""
        return self._feed.step

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped; its gradients are not finite, and torch's optimizers get none.
        For optimizers that are not torch's, and for weights that you copy by hand."""
        return self._feed.guard.skipped

    @property
    def scaler(self) -> Scaler | None:
        """What knows the scale of the loss; set it if the scaler is made later."""
        return self._feed.scaler

    @scaler.setter
    def scaler(self, scaler: Scaler | None) -> None:
        self._feed.scaler = checked_scaler(scaler)

    def swap(self, strategy: Strategy | str) -> None:
        """Go on with another strategy from the next step on.

        Call it on every rank between the same two steps. The ranks compare step and strategy, and
        all refuse if they differ; the old strategy then stays in force. What the old one keeps goes over
        where the new one has the same (``ErrorFeedback.memory``, say) and nothing in it yet; the log says
        what does not.
        """
        self._must_be_between_steps("swap")
        self._feed.finish_step()
        strategy = as_strategy(strategy)
        told = {"step": self.step, "strategy": describe(strategy, shared_only=True)}
        against = objection_to(strategy, self._module(), self._world, self._ownership)
        note = {**told, "objection": as_note(against)}
        _, all_told = self._board.agree(f"swap{self._swaps}", note, doing="swap")
        self._swaps += 1
        refuse_objections(all_told, against, "swap")
        refuse_differences(all_told, tuple(told), "swap")
        warn_of_unmatched(strategy, self._parameter_names())
        follow(self.strategy, strategy)
        for lost in moved_over(self.strategy, strategy, slots_of(self._parameters)):
            log.warning("swap: dropped %s", lost)
        self.strategy, self._looked = strategy, False
        claim(strategy, self._ownership)

    def metrics(self) -> dict[str, float]:
        """One flat dict for any logger: ``comm/bytes_wire``, ``comm/ratio``, ... since the beginning, and
        ``comm/step/bytes_wire``, ... of the last whole step."""
        return self._ledger.metrics()

    def save(self, path: str | os.PathLike[str], *, timeout: float | timedelta | None = None) -> None:
        """Write a checkpoint: a folder with one file per rank. Call it on every rank, between the same steps.

        A crash at any point leaves the old checkpoint of that folder or the new one. If a rank cannot write
        all ranks raise ``NotSaved``. It holds the step and the memory of the strategy; model and optimizer
        are yours to save. See docs/checkpoints.md. Works after ``close`` too, while the job's store is there.

        The ranks wait for each other, for ``timeout`` seconds if that is not to be what it is in training: a
        rank may be busy with the model.
        """
        self._must_not_be_in_a_step("save")
        board = self._allowing(timeout, "save")
        self._feed.finish_step()
        save(board, Path(path), self._subject(), self._layout_to_come)

    def load(
        self, path: str | os.PathLike[str], strict: bool = True, *, timeout: float | timedelta | None = None
    ) -> None:
        """Go on where ``save`` was called, with any number of ranks. Call it on every rank.

        Each rank checks all it reads before anything changes; if one refuses all do, naming it. Another
        strategy or another model is refused, unless ``strict`` is False: then what fits by name and shape is
        kept, and the log says what was left out. ``timeout`` is as for ``save``.
        """
        self._must_be_open()
        self._ownership.used = True
        with keep_ledgers(self.strategy):
            loaded = load(self._allowing(timeout, "load"), Path(path), self._subject(), strict)
        self._feed.go_to(loaded.step, loaded.layout)

    def _allowing(self, timeout: float | timedelta | None, doing: str) -> Board:
        seconds = checked_timeout(timeout) or self._board.timeout
        return self._board.allowing(
            Limit(seconds, f"give this call more time on all ranks: {doing}(folder, timeout=3600)")
        )

    def _subject(self) -> Subject:
        text = describe(self.strategy, shared_only=True)
        return Subject(self.strategy, text, self.step, self._parameters, self._feed.layout())

    def works_with(self, state: object) -> bool:
        """Whether this very state of a strategy is at work here."""
        return not self._closed and any(mine is state for _, mine in exclusive_states(self.strategy))

    def _step_begins(self) -> None:
        """Before the first bucket of a step goes on its way."""
        self._ownership.used = True
        if not self._looked and self._feed.step > self._began:
            self._looked = True
            for told in unsaved_state(self.strategy):
                log.warning("%s", told)

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's memory: tensors, numbers and strings only. One per rank."""
        self._feed.finish_step()
        refuse_unsaved_state(self.strategy)
        return {
            "format": FORMAT,
            "step": self.step,
            "strategy": describe(self.strategy, shared_only=True),
            "layout": self._feed.layout(),
            "state": self.strategy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on the same rank of as many; refuses the state of another
        strategy. ``load`` can do more."""
        self._must_be_open()
        if missing := {"format", "step", "strategy", "state"} - set(state):
            raise InvalidValue(f"the state lacks {', '.join(sorted(missing))}; pass what state_dict() gave")
        if state["format"] not in (1, FORMAT):
            raise InvalidValue(f"the state has format {state['format']}, this version reads 1 and {FORMAT}")
        if not saved_by(self.strategy, str(state["strategy"])):
            mine = describe(self.strategy, shared_only=True)
            raise InvalidValue(
                f"the state was saved by {state['strategy']}, this {self.kind} runs {mine}; begin with the "
                "strategy that saved it, and swap() afterwards if you want another"
            )
        if type(state["step"]) is not int or state["step"] < 0:
            raise InvalidValue(f"the state is in step {state['step']!r}; a step is a number from 0 on")
        try:
            layout = as_layout(state.get("layout", []))
        except ValueError as error:
            raise InvalidValue(f"{error}; pass what state_dict() gave") from None
        self._ownership.used = True
        self._take(state["state"])
        self._feed.go_to(state["step"], layout)

    def _take(self, state: object) -> None:
        """All of a plain state, or nothing."""
        if not isinstance(state, Mapping):
            raise InvalidValue(f"the state is a {type(state).__name__}; pass what state_dict() gave")
        wrong = fitting_of(list(named_states(self.strategy)), state, slots_of(self._parameters))[1]
        if wrong:
            raise InvalidValue(f"{in_short(wrong)}; pass what state_dict() gave for the same model")
        before = self.strategy.state_dict()
        try:
            with keep_ledgers(self.strategy):
                self.strategy.load_state_dict(state)
        except Exception:
            self.strategy.load_state_dict(before)
            raise

    def close(self) -> None:
        """Finish what is under way, end the lane and let go of all connections. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._unless_closed.detach()
        self._feed.lane.close()
        self._withheld.close()
        self._ledger.close()
        _open.discard(self)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it may not have come far, or the interpreter is about to go
            if not self._closed:
                self._ledger.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"step {self.step}"
        return f"<{type(self).__name__} of {describe(self.strategy, short=True)}, {state}>"

    def _parameter_names(self) -> list[str]:
        return [parameter.name for parameter in self._parameters]

    def _must_be_open(self) -> None:
        if self._closed:
            raise WrongState(f"this {self.kind} is closed; {self.again}")

    def _must_be_between_steps(self, doing: str) -> None:
        self._must_be_open()
        self._must_not_be_in_a_step(doing)

    def _must_not_be_in_a_step(self, doing: str) -> None:
        if self._feed.in_step:
            raise WrongState(f"{doing} in the middle of a step; call it between two steps")


def _weakly(asked: Callable[[], bool]) -> Callable[[], bool]:
    """Whose method it is goes with its model, and is in no cycle."""
    found = weakref.WeakMethod(asked)
    return lambda: (own := found()) is None or own()


def _model_went(session: weakref.ref[Session], lane: Lane) -> None:
    """In a finalizer: on any thread, at any time, so without waiting."""
    lane.leave()
    if (kept := session()) is not None:
        kept._closed = True
        with contextlib.suppress(Exception):  # a user's sink
            kept._ledger.close()


def close_all() -> None:
    """Close all that is still open."""
    for session in list(_open):
        session.close()
    wait_for_the_leaving()


# For those who forget: a lane that is open when the interpreter goes could take it down.
atexit.register(close_all)
