"""``Session``: what a strategy at work on a model can do, whoever makes its buckets."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ..agree.board import Document
from ..agree.compare import objection
from ..checkpoint.subject import Parameter, parameters_of, slots_of
from ..core.one_model import claim, exclusive_states
from ..core.ownership import Ownership
from ..core.strategy import Strategy, shared_state
from ..core.unsaved_state import unsaved_state
from ..errors import GradlaneError, WrongState
from ..feed.drift import DriftCheck
from ..feed.loss_scale import Scaler, checked_scaler
from ..feed.nonfinite import WORDS, NonFinitePolicy
from ..feed.optimizer_hooks import OptimizerHooks
from ..feed.step import State, Step
from ..lane.base import Lane
from ..lane.mesh_ranks import Mesh
from ..lane.open import Opened
from ..log import log
from ..settings import Settings
from ..strategies.as_strategy import as_strategy
from ..strategies.auto.decisions import Decision
from ..strategies.ledgers import follow
from ..strategies.route import warn_of_unmatched
from ..strategies.text import describe
from ..telemetry.ledger import Ledger
from .checkpoints import Checkpoints
from .choosing import decisions_of, figures_of, tune_by_trials
from .kernels_in_use import kernel_figures, prepare_kernels
from .opening import objection_to, open_for, refuse_missing_groups
from .registry import register, unregister
from .state import SessionState
from .swap import SwapAgreement, move_states

if TYPE_CHECKING:
    from .freezing import Freezing

Self = TypeVar("Self", bound="Session")
T = TypeVar("T")
P = ParamSpec("P")


class Session(Checkpoints):
    """From the moment the ranks have agreed until ``close``; also a context manager that closes.

    It keeps no model alive. If the model is collected and nobody has closed, the session's thread and its
    connections end a moment later. No rank waits for another then.
    """

    reopen: ClassVar[str]
    """How to get another session, for the message of a closed one."""
    gives: ClassVar[Literal["gradients", "weights"]] = "gradients"
    """What the buckets hold."""

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
        mesh: Mesh | None = None,
    ) -> None:
        """Collective. ``owner`` is the user's model, a DDP model say, and ``module`` has the parameters.
        Scopes are those of the ``mesh``, or nodes."""
        self.strategy = strategy
        self.settings = settings
        self._device = device
        self._closed = False
        self._module = weakref.ref(module)  # the model must be collected before its process group
        self._ledger = Ledger(settings.observers)
        self._parameters = self._described(parameters_of(module))
        self._ownership = Ownership(self, module)
        self._searched_stray = False  # for state in places where nobody saves it
        self._freezing: Freezing | None = None  # set by ``freeze_moments``
        warn_of_unmatched(strategy, self._parameter_names())
        opened = open_for(
            strategy, module, self._parameters, group=group, device=device, settings=settings,
            ledger=self._ledger, doing=doing, must_agree=must_agree, gives=self.gives, mesh=mesh,
        )  # fmt: skip
        claim(strategy, self._ownership)
        self._unless_closed = weakref.finalize(owner, _model_collected, weakref.ref(self), opened.lane)
        self._unless_closed.atexit = False  # ``close_all`` does it then
        self._scopes = opened.scopes
        self._optimizers = self._watch_optimizers(module)
        self._step = Step(
            opened.lane,
            self._ledger,
            scopes=opened.scopes,
            policy=NonFinitePolicy(
                settings.nonfinite, opened.lane.check, self._optimizers, WORDS[self.gives]
            ),
            scaler=self._loss_scaler(),
            drift=self._drift_check(opened),
        )
        self._step.on_begin = weakly(self._step_begins, default=None)
        self._board = opened.board
        self._swap_agreement = SwapAgreement(opened.board)
        self._state = SessionState(self._step, opened.board, self._parameters, self._ownership, self._ledger)
        self._start_feed(opened)
        register(self)
        log.info("%s: %s on %d ranks", doing, describe(strategy, short=True), opened.scopes.world)

    @abstractmethod
    def _start_feed(self, opened: Opened) -> None:
        """Make what turns gradients into buckets of ``self._step``."""

    def _described(self, parameters: list[Parameter]) -> list[Parameter]:
        """The parameters as strategies see them."""
        return parameters

    def _watch_optimizers(self, module: nn.Module) -> OptimizerHooks | None:
        """What keeps optimizers from the gradients of a skipped step; None if that is not wanted."""
        found = ((name, weakref.ref(parameter)) for name, parameter in module.named_parameters())
        synced = weakly(self._synced, default=True)
        return OptimizerHooks(found, synced, finish_step=weakly(self._finish_step, default=None))

    def _finish_step(self) -> None:
        """The outcome of the last backward must be known now."""
        self._step.finish_postponed()

    def _loss_scaler(self) -> Scaler | None:
        """The scaler whose factor is in the buckets."""
        return self.settings.scaler

    def _synced(self) -> bool:
        """Whether the backward that runs now ends with the mean of all ranks."""
        return True

    def _replicated(self) -> dict[str, Tensor]:
        """The weights that are the same on all ranks; buffers may differ on purpose."""
        module = self._module()
        return {} if module is None else dict(module.named_parameters())

    def _next_layout(self) -> list[list[str]]:
        """The buckets of the next step. Collective."""
        return self._step.layout()

    @property
    def step(self) -> int:
        """The number of the next step; steps without synchronisation do not count."""
        return self._step.next

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped: its gradients are not finite, and torch's optimizers get none.
        Check it before you use gradients in any other way, as in weights that you copy by hand."""
        self._step.finish_postponed()
        return self._step.state is State.SKIPPED

    @property
    def scaler(self) -> Scaler | None:
        """The scaler of the loss; set it if the scaler is made later."""
        return self._step.scaler

    @scaler.setter
    def scaler(self, scaler: Scaler | None) -> None:
        self._step.scaler = checked_scaler(scaler)

    def swap(self, strategy: Strategy | str) -> None:
        """Use another strategy from the next step on.

        Call it on every rank between the same two steps. The ranks compare step and strategy; if they differ
        all ranks raise, and the old strategy stays. A state of the old strategy moves to the new one if that
        has the same state (``ErrorFeedback.memory``, say) and it is empty; the log lists what was dropped.
        """
        if self._freezing is not None:
            raise WrongState(
                "freeze_moments has chosen the strategy of this attachment, and its optimizer follows that; "
                "call freeze_moments again with another then="
            )
        self._swap_to(self._working(as_strategy(strategy)))

    def _working(self, strategy: Strategy) -> Strategy:
        """The user's strategy, as it works on this model."""
        return strategy

    def _swap_to(
        self,
        strategy: Strategy,
        *,
        doing: str = "swap",
        against: GradlaneError | None = None,
        also: Document | None = None,
    ) -> None:
        """Collective. ``against`` is what this rank has against it; ``also`` is compared too."""
        self._must_be_open()
        self._must_be_between_steps(doing)
        self._step.finish()
        slots = slots_of(self._parameters)
        against = (
            against
            or objection_to(strategy, self._module(), self.gives, self._ownership)
            or objection(
                lambda: strategy.enter(self._scopes, slots),
                lambda: refuse_missing_groups(strategy, self._step.lane),
            )
        )
        self._swap_agreement.agree(self.step, strategy, against, doing, also or {})
        prepare_kernels(strategy, self._device)
        warn_of_unmatched(strategy, self._parameter_names())
        follow(self.strategy, strategy)
        for dropped in move_states(self.strategy, strategy, slots):
            log.warning("%s: dropped %s", doing, dropped)
        self.strategy, self._searched_stray = strategy, False
        claim(strategy, self._ownership)
        self._swapped()

    def _swapped(self) -> None:
        """Another strategy reduces from the next step on."""

    def metrics(self) -> dict[str, float]:
        """A flat dict for any logger: ``comm/bytes_wire``, ``comm/ratio``, ... since the beginning, and
        ``comm/step/bytes_wire``, ... of the last complete step."""
        self._step.lane.order()  # whoever asks may do so on a stream of its own
        figures = {**figures_of(self.strategy), **kernel_figures(self._device)}
        return {**self._ledger.metrics(), **figures}

    def decisions(self) -> list[Decision]:
        """What ``Auto`` has decided so far, and why; nothing with any other strategy."""
        return decisions_of(self.strategy)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """``with attachment.agreed(): evaluate(model)``: the model has the weights that all ranks agreed on.
        Only in local steps do the ranks have others of their own."""
        yield

    def finish(self) -> None:
        """Bring the weights of all ranks together at the end of training. Collective. Only local steps leave
        anything to do."""
        self._must_be_open()

    def works_with(self, state: object) -> bool:
        """Whether this very state of a strategy is in use here."""
        return not self._closed and any(own is state for _, own in exclusive_states(self.strategy))

    def close(self) -> None:
        """Complete the buckets on the lane, end the lane and close all connections. Twice is fine."""
        if self._closed:
            return
        try:
            self._step.finish_postponed()
        except GradlaneError as error:
            log.warning("close: %s", error)
        self._closed = True
        self._unless_closed.detach()
        self._step.lane.close()
        if self._optimizers is not None:
            self._optimizers.close()
        self._ledger.close()
        unregister(self)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # __init__ may have failed, or the interpreter is exiting
            if not self._closed:
                self._ledger.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"step {self.step}"
        return f"<{type(self).__name__} of {describe(self.strategy, short=True)}, {state}>"

    def _step_begins(self, joined: bool) -> Exception | None:
        """Before each step; after the first one, warn of state that no checkpoint would contain."""
        self._ownership.used = True
        tune_by_trials(self.strategy, self._scopes, self.step, self._device)
        if not self._searched_stray and self.step > 0:
            self._searched_stray = True
            for warning in unsaved_state(self.strategy):
                log.warning("%s", warning)
        return None if self._freezing is None else self._freezing.before_step(joined)

    def _drift_check(self, opened: Opened) -> DriftCheck | None:
        every = self.settings.verify_every
        return None if every is None else self._drift(every, opened.lane)

    def _drift(self, every: int, lane: Lane) -> DriftCheck:
        return DriftCheck(
            every, lane, self._scopes.rank, self._scopes.world,
            weights=self._replicated, state=lambda: shared_state(self.strategy), alike=self._alike(),
        )  # fmt: skip

    def _alike(self) -> list[list[int]]:
        """Which ranks have the same weights; none stands for all."""
        return []

    def _parameter_names(self) -> list[str]:
        return [parameter.name for parameter in self._parameters]


def weakly(method: Callable[P, T], default: T) -> Callable[P, T]:
    """Calls a method of an object without keeping the object; ``default`` when it is collected."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return default if (bound := found()) is None else bound(*args, **kwargs)

    return call


def _model_collected(session: weakref.ref[Session], lane: Lane) -> None:
    """In a finalizer: on any thread, at any time, so without waiting."""
    lane.leave()
    if (found := session()) is not None:
        found._closed = True
        with contextlib.suppress(Exception):  # a user's sink
            found._ledger.close()
