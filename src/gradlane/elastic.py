"""Process groups for jobs that torchrun restarts."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .agree.board import Board
from .agree.limits import Limit, checked_timeout, torch_default_timeout
from .errors import InvalidValue, WrongState

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def init_elastic(
    backend: str | None = None, *, timeout: float | timedelta | None = None, **options: Any
) -> None:
    """``init_process_group`` for a worker of torchrun that also works after a restart.

    torchrun keeps one store for all attempts. With ``init_process_group``, a worker finds the addresses of
    the previous attempt there, and waits for a dead peer or is refused by it. ``init_elastic`` first lets the
    ranks agree on a prefix in the store that only this attempt uses. torchrun's count of restarts cannot be
    that prefix: every node counts its own, and a change of membership is not counted.

    Args:
        backend: as for ``init_process_group``: ``"gloo"``, ``"nccl"``, or None for torch's choice.
        timeout: seconds (or a ``timedelta``) for the ranks to meet, and for all collectives of the group;
            torch's default if None, half an hour. A worker that stalls is restarted after this time, so it
            should be longer than the longest evaluation or save on one rank.
        options: other arguments of ``init_process_group``: ``device_id``, ``pg_options``.
    """
    if taken := sorted({"store", "rank", "world_size", "init_method"} & set(options)):
        raise InvalidValue(
            f"init_elastic takes {', '.join(taken)} from the environment that torchrun sets; leave it out, "
            "or use torch.distributed.init_process_group"
        )
    if dist.is_initialized():
        raise WrongState(
            "there is a process group already; call init_elastic once, instead of init_process_group"
        )
    if missing := [name for name in NEEDED if name not in os.environ]:
        raise WrongState(
            f"init_elastic is for workers of torchrun, which sets {', '.join(missing)}; start with "
            "`torchrun --nproc-per-node 2 --max-restarts 3 script.py`, or use "
            "torch.distributed.init_process_group"
        )
    seconds = checked_timeout(timeout)
    limit = torch_default_timeout(backend) if seconds is None else timedelta(seconds=seconds)
    store, rank, world = next(dist.rendezvous("env://", timeout=limit))
    board = Board(store, f"gradlane/elastic/{world}", rank, world, Limit(limit.total_seconds()))
    token, _ = board.agree("attempt", {}, doing="init_elastic")
    dist.init_process_group(
        backend, store=dist.PrefixStore(token, store), rank=rank, world_size=world, timeout=limit, **options
    )
