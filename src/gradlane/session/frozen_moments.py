"""Adam's second moment in local training, frozen: the same on all ranks from the freeze on."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import InvalidValue, WrongState
from ..feed.adam_moments import SECOND, check_adam, freeze, frozen_states, unusable
from ..feed.drift import NO_VOTE, hashed
from ..log import log


def freeze_now(optimizer: Optimizer) -> None:
    """Freeze the second moment. The optimizer keeps its momentum, and nothing is sent."""
    check_adam(optimizer)
    for p, why in unusable(optimizer):
        raise InvalidValue(f"the second moment of a parameter of shape {list(p.shape)} {why}")
    if masked := freeze(optimizer, move=False):
        log.warning(
            "freeze_moments: %d elements of %d parameters have never had a gradient; their second moment is "
            "0, so they stay where they are",
            sum(masked.values()),
            len(masked),
        )


class FrozenMoments:
    """A copy of the frozen second moments: a step with a gradient that is NaN would spoil them for ever.

    Without frozen moments it does nothing. It does not keep the optimizer alive.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        self._compared = False

    def freeze(self) -> None:
        if (optimizer := self._optimizer()) is not None:
            freeze_now(optimizer)
            self.follow()

    def follow(self) -> None:
        """Keep a copy if the moments have been frozen since the last call."""
        if self._kept or (optimizer := self._optimizer()) is None:
            return
        self._kept = {
            p: {key: state[key].clone() for key in SECOND if key in state}
            for p, state in frozen_states(optimizer)
        }

    def forget(self) -> None:
        """The optimizer has loaded a state."""
        self._kept, self._compared = {}, False

    def hash_to_compare(self) -> int:
        """Of moments that the ranks have not compared yet; no vote if they have, or nothing is frozen."""
        if self._compared or not self._kept:
            return NO_VOTE
        return hashed(dict(enumerate(self._kept.values())))

    def compared(self) -> None:
        self._compared = bool(self._kept)

    @torch.no_grad()
    def restore(self) -> int:
        """Repair what is NaN: the second moment from the copy, momentum as 0. Returns how many parameters."""
        if (optimizer := self._optimizer()) is None:
            return 0
        count = 0
        for p, state in frozen_states(optimizer):
            spoiled = not torch.isfinite(state["exp_avg"]).all()
            if any(state[key].isnan().any() for key in SECOND if key in state):
                if p not in self._kept:
                    raise WrongState(
                        "a step has made the frozen second moment NaN before the first round after the "
                        "freeze, so there is no copy of it; load the last checkpoint"
                    )
                for key, moment in self._kept[p].items():
                    state[key].copy_(moment)
                spoiled = True
            if spoiled:
                state["exp_avg"].zero_()
                count += 1
        return count
