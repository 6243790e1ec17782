"""Steps that do not count: what a mean that is not finite, or a failure, does to memory and optimizers."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from ..core.bucket import Bucket
from ..core.strategy import Strategy, Undoable, is_undoable, named_states
from ..core.streams import has_streams
from ..errors import InvalidValue, NonFinite
from ..kernels.finite import finite_flag
from ..lane.finite_check import CARRIED, FINE, FiniteCheck, names_not_finite
from ..log import log
from .optimizer_hooks import OptimizerHooks

Policy = Literal["skip", "raise", "propagate"]
MAX_SKIPS = 10  # in a row; training that skips more has diverged
CHECK_OWN = 100  # steps after a skip in which each rank checks its own gradients too


class Words(NamedTuple):
    """How messages call a step, what a rank gives, and what comes back."""

    step: str
    given: str
    answer: str


WORDS = {
    "gradients": Words("step", "gradient", "mean gradient"),
    "weights": Words("round", "weight", "agreed weight"),
}


def checked_policy(nonfinite: str) -> Policy:
    for policy in get_args(Policy):
        if nonfinite == policy:
            return policy  # type: ignore[no-any-return]
    raise InvalidValue(f"nonfinite={nonfinite!r} is not known; use 'skip', 'raise' or 'propagate'")


class NonFinitePolicy:
    """Keeps or undoes what a step wrote to memory, and carries out the policy for a mean that is not finite.

    - "skip": memory is as before the step. The gradients stay as they are, so that a GradScaler sees them,
      but optimizers get none (``OptimizerHooks``).
    - "raise": the same, and every rank raises ``NonFinite``.
    - "propagate": no rank checks, as with plain DDP.
    """

    def __init__(
        self,
        policy: Policy,
        check: FiniteCheck,
        optimizers: OptimizerHooks | None = None,
        words: Words = WORDS["gradients"],
    ) -> None:
        self.check_own_until = 0
        """Up to this step each rank checks its own gradients (``check_own``)."""
        self._policy = policy
        self._check = check
        self._check.on = policy != "propagate"
        self._optimizers = optimizers
        self._words = words
        self._step = 0
        self._skips_in_a_row = 0
        self._own: list[tuple[Bucket, bool | Tensor]] = []  # this rank's buckets, and whether they are finite
        self._states: list[Undoable] = []

    def begin_step(self, strategy: Strategy, step: int, *, joined: bool = False) -> None:
        """Before the first bucket. The zeros of a ``joined`` rank say nothing about its gradients."""
        self._step = step
        self._own.clear()
        hooks = self._optimizers
        carried = hooks is not None and hooks.begin_step()
        spoiled = carried and hooks is not None and hooks.adds_means
        self._check.begin(carried=carried or joined, spoiled=spoiled)
        self._states = [leaf.state for leaf in named_states(strategy) if is_undoable(leaf.state)]
        for state in self._states:
            # A step may fail on one rank only, so shared state must be undoable whatever the policy is.
            state.undoable = self._policy != "propagate" or state.shared

    @property
    def raises(self) -> bool:
        """Whether a mean that is not finite is an error, which belongs to the backward that made it."""
        return self._policy == "raise"

    def check_own(self, bucket: Bucket) -> None:
        """Log whose gradient is not finite: the mean shows the parameter, but not the rank. On a device this
        is asked for when the step is skipped, and no earlier: the host would have to wait."""
        if has_streams(bucket.flat.device):
            self._own.append((bucket, finite_flag(bucket.flat)))
        elif names := names_not_finite(bucket):
            self._log_own(bucket, names)

    def _log_own(self, bucket: Bucket, names: list[str]) -> None:
        what = _describe(self._words.given, names)
        log.warning("%s %d: on rank %d %s", self._words.step, bucket.step, bucket.rank, what)

    def end_step(self, *, failed: bool) -> tuple[bool, NonFinite | None]:
        """Keep or undo what the step wrote: whether it is skipped, and the error to raise on all ranks."""
        skipped = self._check.agreed != FINE and not failed
        for state in self._states:
            end = state.undo if failed else getattr(state, "skip", state.undo) if skipped else state.keep
            end()
        if skipped:
            return True, self._skip()
        if not failed:
            self._skips_in_a_row = 0
        return False, None

    def _skip(self) -> NonFinite | None:
        for bucket, finite in self._own:
            if not finite:
                self._log_own(bucket, list(bucket.names))
        names = self._check.names()
        if self._optimizers is not None:
            self._optimizers.withhold(names)
        carried = self._check.agreed == CARRIED
        self._skips_in_a_row += not carried
        self.check_own_until = self._step + CHECK_OWN
        what, step = _describe(self._words.answer, names), self._words.step
        if self._policy == "raise":
            return NonFinite(
                f"{step} {self._step}: {what}; memory is as before the {step}. Lower the learning rate, "
                f"clip, or go on without such {step}s: nonfinite='skip'"
            )
        if carried and not names:
            what = "its gradient was added to that of a skipped step, which zero_grad() has not cleared"
        elif carried:
            what += "; it was added to that of a skipped step, which zero_grad() has not cleared"
        elif self._skips_in_a_row > MAX_SKIPS:
            return NonFinite(
                f"{step} {self._step}: {what}, after {MAX_SKIPS} skipped {step}s in a row, the most allowed: "
                "training has diverged; go back to a checkpoint, with a lower learning rate or clipping"
            )
        log.warning("%s %d is skipped on all ranks: %s", step, self._step, what)
        return None


def _describe(kind: str, names: list[str]) -> str:
    if not names:
        return f"a {kind} is not finite on another rank"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the {kind} of {names[0]}{more} is not finite"
