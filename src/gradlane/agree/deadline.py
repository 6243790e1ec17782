"""Calls into torch that may never return, with an end all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

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
