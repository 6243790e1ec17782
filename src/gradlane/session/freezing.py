"""``freeze_moments`` at work: an Adam optimizer follows the steps of the session whose gradients it uses.

The strategy is ``After(after, SharedMomentum(...), first)``, from the call on: which step sends what depends
on the step's number alone, and a checkpoint has the same strategy before the freeze as after it. The
optimizer is frozen before step ``after`` begins, not after an ``optimizer.step()``: a GradScaler may leave
that one out.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..core.memory import Memory
from ..errors import GradlaneError, WrongState
from ..feed.adam_moments import BETA2, MARK, freeze, is_moved, moments, momentum, thaw
from ..feed.optimizer_closures import closure_in
from ..log import log
from ..strategies.schedule import After
from ..strategies.shared_momentum import SharedMomentum
from .moments_agreement import MomentsAgreement

if TYPE_CHECKING:
    from .base import Session


class Freezing:
    """One optimizer and one session; it keeps neither alive."""

    def __init__(
        self, optimizer: Optimizer, session: Session, strategy: After, momentum: SharedMomentum
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._session = weakref.ref(session)
        self._strategy, self._momentum = strategy, momentum
        self._agreement = MomentsAgreement(session._board)
        self._thawed = False  # for the one step of a refresh
        self._handles = [
            optimizer.register_step_pre_hook(self._before_optimizer),
            optimizer.register_step_post_hook(self._after_optimizer),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def _memory(self) -> Memory:
        return self._momentum.memory

    def before_step(self, joined: bool) -> GradlaneError | None:
        """Freeze if it is time; the error that fails this step on all ranks, if any."""
        optimizer, session = self._optimizer(), self._session()
        if session is None:
            return None
        if optimizer is None:
            return WrongState(
                "the optimizer that was given to freeze_moments was deleted; call freeze_moments with the "
                "one that steps now"
            )
        try:
            self._follow(optimizer, session, joined)
        except GradlaneError as error:
            return error
        return None

    def _follow(self, optimizer: Optimizer, session: Session, joined: bool) -> None:
        if self._thawed:  # the optimizer's step has raised
            self._freeze(optimizer, session)
        moved, filled = is_moved(optimizer), not self._memory.empty
        due = session.step >= self._strategy.step
        if moved != filled or (moved and not due):
            frozen = (
                "the optimizer's moments are frozen" if moved else "the optimizer's moments are not frozen"
            )
            has = "has the momentum" if filled else "does not have the momentum"
            raise WrongState(
                f"freeze_moments: {frozen}, and the attachment, in step {session.step} with "
                f"after={self._strategy.step}, {has}: they are of different steps. Load the optimizer's "
                "state and the attachment's of one checkpoint"
            )
        if due and not moved:
            self._agreement.agree(optimizer, self._names(session), self._momentum, session.step, joined)
            masked = self._freeze(optimizer, session)
            _report(masked, self._names(session), session.step, bool(self._strategy.refresh))

    def _freeze(self, optimizer: Optimizer, session: Session) -> dict[Tensor, int]:
        """The optimizer's momentum moves to the memory of the strategy."""
        masked = freeze(optimizer, move=True)
        names = self._names(session)
        self._memory.load_state_dict(
            {
                names[p]: (m := momentum(group, state)).to(self._memory.width(m.dtype))
                for group, p, state in moments(optimizer)
            }
        )
        self._thawed = False
        return masked

    def _names(self, session: Session) -> dict[Tensor, str]:
        return {p: name for name, p in session._replicated().items()}

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before each ``optimizer.step()``: in a refresh, Adam makes one step of its own."""
        session = self._session()
        if session is None or not session.is_open or not is_moved(optimizer):
            return
        _check_groups(optimizer)
        if self._strategy.refresh is None:
            return
        if closure_in(args, kwargs):
            raise WrongState(
                "optimizer.step(closure) runs backward when it is too late to tell whether this step is a "
                "refresh; run backward before optimizer.step(), or leave out refresh="
            )
        if self._strategy.is_first(session.step - 1) and not session.skipped and not _found_inf(optimizer):
            names, state = self._names(session), self._memory.state_dict()
            thaw(optimizer, lambda p: state.get(names[p]))
            self._thawed = True

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        session = self._session()
        if self._thawed and session is not None:
            self._freeze(optimizer, session)


def _check_groups(optimizer: Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        if MARK not in group:
            raise WrongState(
                f"group {number} was added after the moments were frozen, and has none; add it before that, "
                "or make a new optimizer and warm up again"
            )
        if tuple(group["betas"]) != (0.0, BETA2):
            raise WrongState(
                f"group {number} has betas={tuple(group['betas'])}, and freeze_moments has set (0.0, "
                f"{BETA2}): the momentum is in what arrives. If a schedule sets betas, tell it not to: "
                "OneCycleLR(..., cycle_momentum=False)"
            )


def _found_inf(optimizer: Optimizer) -> bool:
    """Whether a GradScaler skips this step; it asks fused optimizers to do so themselves."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _report(masked: dict[Tensor, int], names: dict[Tensor, str], step: int, refresh: bool) -> None:
    log.info("freeze_moments: step %d is the first that sends momentum", step)
    if not masked:
        return
    largest = sorted(masked, key=lambda p: -masked[p])[:3]
    log.warning(
        "freeze_moments: %d elements have never had a gradient, in %s%s; their second moment is 0, so they "
        "stay where they are%s",
        sum(masked.values()),
        ", ".join(f"{names[p]} ({masked[p]} of {p.numel()})" for p in largest),
        f" and {len(masked) - 3} more" if len(masked) > 3 else "",
        " until a refresh meets a gradient of theirs" if refresh else "",
    )
