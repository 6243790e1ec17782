"""DDP's rebuilt buckets, before the forward that would make them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def rebuilt_buckets(ddp: DistributedDataParallel | None) -> list[list[Tensor]]:
    """After the first backward: let DDP rebuild its buckets now, and tell the parameters in each.

    DDP does that at the beginning of the second forward, from the order in which gradients came in the first
    backward. A checkpoint between the two could not know the buckets of the step that follows. It is a
    collective of DDP's own, on all ranks or on none. With ``static_graph`` all that is one step later.
    Nothing at any other time.
    """
    if ddp is None:
        return []
    with torch.enable_grad():
        if not ddp.reducer._rebuild_buckets():
            return []
    ddp._has_rebuilt_buckets = True
    return [list(bucket.parameters()) for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
