"""Whether the answers of a step are numbers: what this rank saw, and what all ranks agreed on."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.bucket import Bucket
from ..core.strategy import Reduced
from ..kernels.finite import all_finite

FINE, CARRIED, BAD = 0, 1, 2
"""What a rank says of a step, and the largest of what all say. ``CARRIED``: not finite because the gradient
was added to that of a skipped step, as micro-batches without ``no_sync`` are."""


class FiniteCheck:
    """Looks at the answer of every bucket while it is ``on``; a lane has one.

    What was seen rides with the message that ends a step. Answers are the same on every rank, so that it is
    enough if the ranks look that are not ``bounded``; if a strategy of one's own has a fault, all still agree.
    """

    def __init__(self) -> None:
        self.on = False
        self.agreed = FINE
        """What all ranks together saw of the last step; set when the step ended."""
        self._carried = False
        self._answers: list[Bucket] = []
        self._fine: list[Tensor | bool] = []

    def begin(self, *, carried: bool = False) -> None:
        self._answers.clear()
        self._fine.clear()
        self.agreed = FINE
        self._carried = carried

    def look(self, bucket: Bucket, reduced: Reduced) -> None:
        mean = reduced.mean
        if not self.on or mean.is_meta:
            return
        self._answers.append(bucket.with_flat(mean))
        if reduced.bounded and mean.dtype != torch.float16:
            return
        # Another device says so later, when the step has ended: nothing here may wait for it.
        self._fine.append(all_finite(mean) if mean.device.type == "cpu" else torch.isfinite(mean).all())

    @property
    def seen(self) -> int:
        """What this rank saw."""
        if all(map(bool, self._fine)):
            return FINE
        return CARRIED if self._carried else BAD

    def names(self) -> list[str]:
        """The parameters with such an answer; all ranks have the same, whoever looked first."""
        return [name for answer in self._answers for name in names_not_finite(answer)]


def names_not_finite(bucket: Bucket) -> list[str]:
    if all_finite(bucket.flat):
        return []
    if bucket.flat.is_sparse:
        return list(bucket.names)
    return [name for name, part in zip(bucket.names, bucket.tensors(), strict=True) if not all_finite(part)]
