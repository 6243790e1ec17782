"""The rounds of one local training: begun after a step, completed by all ranks, applied to the weights."""

from __future__ import annotations

import weakref

import torch

from ..feed.drift import hashed
from ..feed.rounds import ALL, Call, Completed, Round
from ..feed.step import State, Step
from ..feed.weight_buckets import WeightBucket
from ..log import log
from ..strategies.local_steps import LocalSteps
from .frozen_moments import FrozenMoments
from .local_position import Position
from .local_weights import LocalWeights
from .optimizer_state import drop_broken_state


class LocalRounds:
    """At most one round is under way. It keeps neither model nor optimizer alive."""

    def __init__(
        self,
        step: Step,
        weights: LocalWeights,
        fragments: list[list[WeightBucket]],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._step = step
        self._weights = weights
        self._fragments = fragments
        self._optimizer = weakref.ref(optimizer)
        self._device = device
        self._moments = FrozenMoments(optimizer)
        self._current: Round | Completed | None = None  # not yet applied
        self._apply_at = 0
        self._compared = False  # the anchor, over all ranks

    def after_step(self, strategy: LocalSteps, local_steps: int) -> None:
        """Apply what is due after so many steps of the optimizer, and begin what is due."""
        if self._current is not None and local_steps >= self._apply_at:
            self.apply(strategy)
        if (fragment := strategy.due(local_steps)) is not None:
            self.begin(strategy, local_steps, fragment)
            self._apply_at = local_steps + strategy.delay
            if strategy.delay == 0:
                self.apply(strategy)

    def freeze_moments(self) -> None:
        """At the end of the warm-up, when all ranks have the same."""
        self._moments.freeze()

    def begin(self, strategy: LocalSteps, local_steps: int, fragment: int = ALL) -> None:
        self._moments.follow()
        anchor = 0 if self._compared else hashed(strategy.anchor.state_dict())
        call = Call(local_steps, fragment, anchor, self._moments.hash_to_compare())
        self._current = begun = Round(self._step, strategy, call, self._device)
        if strategy.buffers == "mean":
            begun.submit_buffers(self._weights.buffers())
        begun.submit_weights(self._of(fragment), self._weights.parameters())

    def complete(self, strategy: LocalSteps) -> None:
        """Wait for the round. If it failed this raises, and no weight has changed on any rank."""
        if isinstance(self._current, Round):
            with torch.inference_mode(False):  # an evaluation may have asked; training writes to what is kept
                outcome = self._current.complete(strategy.agreed_buffers)
            self._current = None
            if isinstance(outcome, BaseException):
                raise outcome
            self._current, self._compared = outcome, True
            self._moments.compared()

    def apply(self, strategy: LocalSteps) -> None:
        """Complete the round, and take over what the ranks have agreed on."""
        self.complete(strategy)
        completed, self._current = self._current, None
        if not isinstance(completed, Completed):
            return
        if completed.outcome is State.SKIPPED:
            self._go_back()
            return
        names = [name for bucket in self._of(completed.fragment) for name in bucket.names]
        self._weights.take_over(names, 0.0 if completed.fragment == ALL else strategy.blend)
        self._weights.show_agreed_buffers()

    def _go_back(self) -> None:
        """What some rank has learned is not finite: all ranks go back to the anchor."""
        self._weights.show_agreed()
        dropped = 0 if (optimizer := self._optimizer()) is None else drop_broken_state(optimizer)
        dropped += self._moments.restore()
        log.warning("round %d: all ranks go back to the weights of the last round", self._step.next - 1)
        if dropped:
            log.warning("the optimizer's state of %d parameters is not finite: it is dropped", dropped)

    def _of(self, fragment: int) -> list[WeightBucket]:
        """The buckets of a fragment."""
        chosen = self._fragments if fragment == ALL else [self._fragments[fragment]]
        return [bucket for buckets in chosen for bucket in buckets]

    def position(self, local_steps: int) -> Position:
        """For a checkpoint; the round under way is complete."""
        current = self._current
        skipped = isinstance(current, Completed) and current.outcome is State.SKIPPED
        fragment = None if current is None else current.fragment
        return Position(local_steps, self._compared, self._apply_at, fragment, skipped)

    def go_to(self, position: Position, *, same_ranks: bool) -> None:
        """Continue at a position; with other ranks from the anchor, so there is nothing to apply."""
        self._apply_at, self._compared = position.apply_at, position.compared
        self._current = position.completed() if same_ranks else None
        self._moments.forget()
