"""The hooks of torch's ``powerSGD_hook`` module; their state is in ``powersgd_state.py``.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations by identity.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WrongType
from ..strategies.lowrank.rank import View
from .powersgd_state import PowerSGDState
from .wrappers import translations


@dataclass(frozen=True)
class _LowRank:
    """The strategy itself belongs to the state; this says which of its forms is meant."""

    view: View
    wires: tuple[torch.dtype, ...] = ()

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not isinstance(state, PowerSGDState):
            kind = f"{type(state).__module__}.{type(state).__qualname__}"
            raise WrongType(
                f"the state of this hook is a gradlane.compat.PowerSGDState, got {kind}; import both from "
                "gradlane.compat"
            )
        return state.reduce(bucket, self.view, self.wires)

    def narrowed(self, dtype: torch.dtype) -> "_LowRank":
        return replace(self, wires=(*self.wires, dtype))


_TENSORS = _LowRank("tensor")
_BUCKETS = _LowRank("bucket")


def powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PowerSGD for each gradient matrix; vectors and what would gain too little are sent as they are.

    Works with any number of buckets, on every backend. As in torch the first ``start_powerSGD_iter``
    iterations are plain means. With ``fp16_compress_wrapper`` or ``bf16_compress_wrapper`` round it, narrow
    numbers are sent, and its memory stays as wide as it is.
    """
    return _TENSORS.reduce(state, bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PowerSGD on each bucket as one nearly square matrix; ``min_compression_rate`` does not count.

    What is found then depends on which parameters share a bucket. DDP begins with other buckets than it
    goes on with, so a resumed run takes its first step a little differently from one that never stopped.
    """
    return _BUCKETS.reduce(state, bucket)


translations[powerSGD_hook] = _TENSORS
translations[batched_powerSGD_hook] = _BUCKETS
