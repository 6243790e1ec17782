"""``shutdown``: the end of a run, in the order that never hangs."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch.distributed as dist

from . import compat
from .lane.perform import meet
from .session import registry


def close_all() -> None:
    """Close every attachment and every lane of a compat hook that is still open."""
    registry.close_all()
    compat.close_all()


def shutdown(timeout: float = 30.0) -> None:
    """Close everything of gradlane, then destroy the process groups.

    Call it last, on every rank, instead of ``destroy_process_group``, when the DDP model and its
    optimizer are out of scope: train in a function, and shut down after it has returned. A group
    that is destroyed while a DDP model still refers to it can hang the process at its exit (Gloo's
    workers need the GIL that the model's destructor holds while it waits for them). The ranks wait for
    each other for ``timeout`` seconds at most.
    """
    close_all()
    gc.collect()
    if not dist.is_initialized():
        return
    try:
        if dist.get_world_size() > 1:
            meet(timedelta(seconds=timeout))
    except RuntimeError:
        pass  # a peer has ended already; nobody needs it any more
    dist.destroy_process_group()
