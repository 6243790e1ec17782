"""Whether the answers of a step are numbers: what this rank saw, and what all ranks agreed on."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.bucket import Bucket
from ..core.strategy import Reduced
from ..kernels.finite import all_finite


class FiniteCheck:
    """Looks at the answer of every bucket while it is ``on``; a lane has one.

    What was seen rides with the message that ends a step. Answers are the same on every rank, so that it is
    enough if those look who are not ``sound``; and if a strategy of one's own has a fault, all still agree.
    """

    def __init__(self) -> None:
        self.on = False
        self.agreed = False
        """Some rank saw an answer that is not finite in the last step; set when the step ended."""
        self._answers: list[Bucket] = []
        self._fine: list[Tensor | bool] = []

    def begin(self) -> None:
        self._answers.clear()
        self._fine.clear()
        self.agreed = False

    def look(self, bucket: Bucket, reduced: Reduced) -> None:
        mean = reduced.mean
        if not self.on or mean.is_meta:
            return
        self._answers.append(bucket.with_flat(mean))
        if reduced.sound and mean.dtype != torch.float16:
            return
        # Another device says so later, when the step has ended: nothing here may wait for it.
        self._fine.append(all_finite(mean) if mean.device.type == "cpu" else torch.isfinite(mean).all())

    @property
    def seen(self) -> bool:
        """Whether this rank saw one."""
        return not all(map(bool, self._fine))

    def names(self) -> list[str]:
        """The parameters with such an answer; all ranks have the same, whoever looked first."""
        return [name for answer in self._answers for name in names_not_finite(answer)]


def names_not_finite(bucket: Bucket) -> list[str]:
    if all_finite(bucket.flat):
        return []
    if bucket.flat.is_sparse:
        return list(bucket.names)
    return [name for name, part in zip(bucket.names, bucket.tensors(), strict=True) if not all_finite(part)]
