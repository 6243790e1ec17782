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
        self._looks: list[tuple[Bucket, Tensor | bool]] = []

    def begin(self) -> None:
        self._looks.clear()
        self.agreed = False

    def look(self, bucket: Bucket, reduced: Reduced) -> None:
        mean = reduced.mean
        if not self.on or mean.is_meta or (reduced.sound and mean.dtype != torch.float16):
            return
        if mean.device.type == "cpu":
            fine = all_finite(mean)
            if fine:
                return
            self._looks.append((bucket.with_flat(mean), fine))
        else:  # the device says so later, when the step has ended: nothing here may wait for it
            self._looks.append((bucket.with_flat(mean), torch.isfinite(mean).all()))

    @property
    def seen(self) -> bool:
        """Whether this rank saw one."""
        return any(not bool(fine) for _, fine in self._looks)

    def names(self) -> list[str]:
        """The parameters with such an answer, as this rank saw it."""
        return [name for bucket, fine in self._looks if not bool(fine) for name in names_not_finite(bucket)]


def names_not_finite(bucket: Bucket) -> list[str]:
    if all_finite(bucket.flat):
        return []
    if bucket.flat.is_sparse:
        return list(bucket.names)
    return [name for name, part in zip(bucket.names, bucket.tensors(), strict=True) if not all_finite(part)]
