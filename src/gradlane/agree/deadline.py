"""A deadline for calls into torch that may never return; and who hosts the store that they ask."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import PeerLost

T = TypeVar("T")


class NoAnswer(PeerLost):
    """The call is still under way, but nobody waits for it any more."""


def within(seconds: float, call: Callable[[], T], what: str) -> T:
    """Return what the call returns, or raise what it raises; ``NoAnswer`` if it takes longer.

    torch's client of a TCP store waits for ever if the store's host is stopped, whatever its timeout, and no
    signal handler runs meanwhile. So the call runs on a thread of its own, and this thread waits in Python.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # noqa: BLE001  raised again by the caller
            raised.append(error)

    thread = threading.Thread(target=run, name="gradlane-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise NoAnswer(f"{what} gave no answer within {seconds:g} s")
    if raised:
        raise raised.pop()
    return returned.pop()


class Host(NamedTuple):
    """The process that hosts a store."""

    who: str
    rank: int | None
    """Its rank in the group, or None if it is not in the group."""


def host_of(store: dist.Store, world: int) -> Host:
    """torchrun's agent hosts the store for all ranks; without torchrun, rank 0 of the job does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return Host("what holds the store", None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Host("torchrun's agent, which holds the store,", None)
    all_ranks = dist.is_initialized() and dist.get_world_size() == world
    return Host("rank 0, which holds the store,", 0 if all_ranks else None)
