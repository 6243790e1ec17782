"""A host name of its own for a process, so that ranks of one machine seem to be on several."""

import ctypes
import os
import socket
import sys

CLONE_NEWUTS = 0x04000000


def why_not():
    """Why a process cannot have a host name of its own here, or None."""
    if sys.platform != "linux":
        return "only Linux has namespaces of host names"
    return None if os.geteuid() == 0 else "a namespace of host names needs root"


def move_to(name):
    """Give this thread a host name that nobody else sees."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
