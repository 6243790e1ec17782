"""Processes that end together: what a rank has started outlives neither it nor the process above it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
LOOK_EVERY = 0.5  # seconds; where a process is not told that its parent has died


class Family:
    """A process group, for children of this process and all that they start.

    Its leader is a small process that does nothing but wait: when this one is gone, however it ended, it
    kills the group. Those of a group that have a session of their own have left the family.
    """

    def __init__(self) -> None:
        parent = os.getpid()
        self._leader = os.fork()
        if self._leader == 0:
            _keep(parent)
        _lead(self._leader)
        self._ended = False

    def join(self) -> None:
        """Of a child, in that child."""
        os.setpgid(0, self._leader)

    def end(self) -> None:
        """Kill what is still there. Twice is fine."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._leader, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody has waited for all children
            os.waitpid(self._leader, 0)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(by))


def _lead(leader: int) -> None:
    """Asked for by both sides: whoever comes first, the group is there."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(leader, leader)


def _keep(parent: int) -> NoReturn:
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _lead(os.getpid())
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # else the other end of a pipe would never see it closed
        die_with_parent(by=signal.SIGTERM)
        if sys.platform == "linux" and os.getppid() == parent:  # else it died before we asked
            signal.sigwait({signal.SIGTERM})
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY)
        os.killpg(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)
