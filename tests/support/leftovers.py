"""What a run may leave behind: processes and network namespaces."""

import contextlib
import os
import time
from pathlib import Path


def namespaces(processes=None):
    """The network namespaces of these processes, or of all, but for our own."""
    paths = (
        Path("/proc").glob("[0-9]*/ns/net") if processes is None else (f"/proc/{p}/ns/net" for p in processes)
    )
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return found - {os.readlink("/proc/self/ns/net")}


def members(session):
    """The processes of a session that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def children(parent):
    """The processes that this one has started and that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def gone(condition, seconds=10):
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()
