"""Steps that do not count: answers that are no numbers, and what memory makes of steps that failed."""

from __future__ import annotations

from typing import Literal, get_args

from ..core.bucket import Bucket
from ..core.strategy import Strategy, Undoable, is_undoable, named_states
from ..errors import InvalidValue, NonFinite
from ..lane.finite_check import CARRIED, FINE, FiniteCheck, names_not_finite
from ..log import log
from .withhold import Withheld

Policy = Literal["skip", "raise", "propagate"]
MOST_SKIPS = 10  # in a row; training that skips more has diverged
WARY = 100  # steps after a skip in which each rank looks at its own gradients too


def checked_policy(given: str) -> Policy:
    for policy in get_args(Policy):
        if given == policy:
            return policy  # type: ignore[no-any-return]
    raise InvalidValue(f"nonfinite={given!r} is not known; use 'skip', 'raise' or 'propagate'")


class Guard:
    """Keeps or undoes what a step wrote to memory, and carries out the policy for non-finite answers.

    - "skip": the step leaves no trace. Memory is as before; the gradients stay as they came, so that a
      GradScaler sees them, but optimizers do not get them (``Withheld``).
    - "raise": the same, and every rank raises ``NonFinite``.
    - "propagate": nobody looks, as with plain DDP.
    """

    def __init__(self, policy: Policy, check: FiniteCheck, withheld: Withheld | None = None) -> None:
        self.open = False  # a step was begun and has not ended
        self.skipped = False
        self._policy = policy
        self._check = check
        self._check.on = policy != "propagate"
        self._withheld = withheld
        self._step = 0
        self._in_a_row = 0
        self._wary_until = 0
        self._states: list[Undoable] = []

    def begin(self, strategy: Strategy, step: int, *, joined: bool = False) -> None:
        """The first bucket of a step is here. A rank that has joined has no gradients to tell of."""
        self.open = True
        self._step = step
        self.skipped = False
        carried = self._withheld is not None and self._withheld.begin()
        self._check.begin(carried=carried or joined)
        self._states = [leaf.state for leaf in named_states(strategy) if is_undoable(leaf.state)]
        for state in self._states:
            # What all ranks must have alike has to be undone in any case: a step may fail between ranks.
            state.undoable = self._policy != "propagate" or state.shared

    def look_at_own(self, bucket: Bucket) -> None:
        """The answer tells which parameter is not finite, not which rank: after a skip each rank looks."""
        if bucket.step < self._wary_until and (names := names_not_finite(bucket)):
            log.warning("step %d: on rank %d %s", bucket.step, bucket.rank, _what("gradient", names))

    def ended(self, *, failed: bool) -> NonFinite | None:
        """The step is over on all ranks, or ``failed`` on all. The error to raise, if there is one."""
        self.open = False
        bad = self._check.agreed != FINE and not failed
        for state in self._states:
            end = state.undo if failed else getattr(state, "skip", state.undo) if bad else state.keep
            end()
        if not bad:
            self._in_a_row = self._in_a_row if failed else 0
            return None
        self.skipped = True
        names = self._check.names()
        if self._withheld is not None:
            self._withheld.withhold(names)
        carried = self._check.agreed == CARRIED
        self._in_a_row += not carried
        self._wary_until = self._step + WARY
        what = _what("mean gradient", names)
        if self._policy == "raise":
            return NonFinite(
                f"step {self._step}: {what}; memory is as before the step. Lower the learning rate, clip, or "
                "go on without such steps: nonfinite='skip'"
            )
        if carried:
            what += "; it was added to that of a skipped step, which zero_grad() has not cleared"
        elif self._in_a_row > MOST_SKIPS:
            return NonFinite(
                f"step {self._step}: {what}, after {MOST_SKIPS} skipped steps in a row, the most allowed: "
                "training has diverged; go back to a checkpoint, with a lower learning rate or clipping"
            )
        log.warning("step %d is skipped on all ranks: %s", self._step, what)
        return None


def _what(kind: str, names: list[str]) -> str:
    if not names:
        return f"a {kind} is not finite on another rank"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the {kind} of {names[0]}{more} is not finite"
