"""Who hosts the job's store: whoever it is, the others cannot ask it when it is gone."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed as dist


class Host(NamedTuple):
    who: str
    rank: int | None
    """Of the group, where a rank of it hosts the store."""


def host_of(store: dist.Store, world: int) -> Host:
    """As torch arranges it: torchrun's agent for all ranks, else rank 0 of the job."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return Host("what holds the store", None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Host("torchrun's agent, which holds the store,", None)
    whole = dist.is_initialized() and dist.get_world_size() == world
    return Host("rank 0, which holds the store,", 0 if whole else None)
