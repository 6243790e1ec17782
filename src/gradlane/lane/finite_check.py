"""Whether the results of a step are finite: what this rank saw, and what all ranks agreed on."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..core.bucket import Bucket
from ..core.strategy import Reduced, Strategy
from ..core.trust import is_our_own
from ..kernels.finite import all_finite, finite_flag

FINE, CARRIED, BAD = 0, 1, 2
"""How a rank rates a step; the ranks agree on the largest rating. ``CARRIED``: non-finite because the
gradient was added to the gradient of a skipped step, as happens with micro-batches without ``no_sync``."""


class FiniteCheck:
    """Checks the result of every bucket while it is ``on``; each lane has one.

    This rank's rating travels with the message that ends the step. Results are the same on every rank, so a
    rank that knows its result to be ``bounded`` need not read it. If a foreign strategy returns different
    results, the ranks still agree.
    """

    def __init__(self) -> None:
        self.on = False
        self.agreed = FINE
        """The rating of the last step by all ranks together; set when the step ended."""
        self._carried = self._spoiled = False
        self._results: list[Bucket] = []
        self._finite: list[Tensor | bool] = []
        self._asked: tuple[weakref.ref[Strategy], int] | None = None  # the last strategy, and its step
        self._is_our_own = False

    def begin(self, *, carried: bool = False, spoiled: bool = False) -> None:
        """``spoiled``: a gradient of a skipped step is still there on this rank, and the result will be added
        to it."""
        self._results.clear()
        self._finite.clear()
        self.agreed = FINE
        self._carried, self._spoiled = carried, spoiled

    def add(self, strategy: Strategy, bucket: Bucket, reduced: Reduced) -> None:
        """The result of a bucket."""
        mean = reduced.mean
        if not self.on or mean.is_meta:
            return
        self._results.append(bucket if mean is bucket.flat else bucket.with_flat(mean))
        if reduced.bounded and mean.dtype != torch.float16 and self._believes(strategy, bucket.step):
            return
        # Another device answers later, at the end of the step: nothing here may wait for it.
        self._finite.append(finite_flag(mean))

    def _believes(self, strategy: Strategy, step: int) -> bool:
        """Once for each strategy and step, since it takes up to 75 us; options may change between steps."""
        if self._asked is None or self._asked[0]() is not strategy or self._asked[1] != step:
            self._asked = weakref.ref(strategy), step
            self._is_our_own = is_our_own(strategy)
        return self._is_our_own

    @property
    def seen(self) -> int:
        """This rank's rating."""
        return self._good if all(map(bool, self._finite)) else self._bad

    def write_rating(self, into: Tensor) -> None:
        """Write this rank's rating into a tensor on the device of the results: the host does not wait."""
        on_device = [flag for flag in self._finite if isinstance(flag, Tensor)]
        if len(on_device) < len(self._finite) and not all(f for f in self._finite if isinstance(f, bool)):
            into.fill_(self._bad)
        else:
            into.fill_(self._good)
            if on_device:
                into.masked_fill_(torch.stack(on_device).all().logical_not(), self._bad)

    @property
    def _good(self) -> int:
        return CARRIED if self._spoiled else FINE

    @property
    def _bad(self) -> int:
        return CARRIED if self._carried else BAD

    def names(self) -> list[str]:
        """The parameters with a non-finite result; the same on all ranks, whichever rank saw them first."""
        return [name for result in self._results for name in names_not_finite(result)]


def names_not_finite(bucket: Bucket) -> list[str]:
    if all_finite(bucket.flat):
        return []
    if bucket.flat.is_sparse:
        return list(bucket.names)
    return [name for name, part in zip(bucket.names, bucket.tensors(), strict=True) if not all_finite(part)]
