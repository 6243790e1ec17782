"""Calls into torch that may never return, with an end all the same; and who hosts the store they ask."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import PeerLost

T = TypeVar("T")


class NoAnswer(PeerLost):
    """The call is still under way, and nobody waits for it any more."""


def within(seconds: float, call: Callable[[], T], what: str) -> T:
    """What the call returns or raises; ``NoAnswer`` if it does neither in time.

    torch's client of a TCP store waits for ever where the store's host is stopped, whatever its time-out,
    and no signal handler runs meanwhile. So the call has a thread of its own, and this one waits in Python.
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
