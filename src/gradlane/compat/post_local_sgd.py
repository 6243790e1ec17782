"""The hook of torch's ``post_localSGD_hook`` module; its state is in ``post_local_state.py``.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations by identity.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WrongType
from .post_local_state import PostLocalSGDState, Wires
from .wrappers import translations


@dataclass(frozen=True)
class _PostLocal:
    wires: Wires = ()

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not isinstance(state, PostLocalSGDState):
            kind = f"{type(state).__module__}.{type(state).__qualname__}"
            raise WrongType(
                f"the state of this hook is a gradlane.compat.PostLocalSGDState, got {kind}; import both "
                "from gradlane.compat"
            )
        return state.reduce(bucket, self.wires)

    def narrowed(self, dtype: torch.dtype) -> "_PostLocal":
        return _PostLocal((*self.wires, dtype))


_PLAIN = _PostLocal()


def post_localSGD_hook(state: PostLocalSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Gradients are averaged over all ranks in the warm-up, then over those of a subgroup or not at all.

    Average the weights too, from the end of the warm-up on: by ``PostLocalSGDOptimizer``, or by an averager
    after ``optimizer.step()``. Its ``warmup_steps`` is ``start_localSGD_iter`` of the state. DDP goes on
    sending rank 0's buffers in each forward, unless it is made with ``forward_sync_buffers=False`` (in older
    versions of torch ``broadcast_buffers=False``).
    """
    return _PLAIN.reduce(state, bucket)


translations[post_localSGD_hook] = _PLAIN
