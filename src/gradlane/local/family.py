"""Processes that end together: children of a rank end with it, and with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
POLL_SECONDS = 0.5  # on systems without a signal at the death of the parent


class Family:
    """A process group (of the operating system) for children of this process and all that they start.

    Its leader is a small process that only waits. When this process has ended, in any way, the leader kills
    the group. A process that starts its own session is no longer a member.
    """

    def __init__(self) -> None:
        parent = os.getpid()
        self._leader = os.fork()
        if self._leader == 0:
            _lead_group(parent)
        _make_leader(self._leader)
        self._ended = False

    def join(self) -> None:
        """Call it in a child: the child becomes a member."""
        os.setpgid(0, self._leader)

    def end(self) -> None:
        """Kill all members. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._leader, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the program has waited for all children
            os.waitpid(self._leader, 0)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for this signal when the parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(by))


def _make_leader(leader: int) -> None:
    """Parent and leader both call it, so that the group exists whichever comes first."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(leader, leader)


def _lead_group(parent: int) -> NoReturn:
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _make_leader(os.getpid())
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # or the other end of a pipe would never be closed
        die_with_parent(by=signal.SIGTERM)
        if sys.platform == "linux" and os.getppid() == parent:  # or it died before we asked
            signal.sigwait({signal.SIGTERM})
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os.killpg(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)
