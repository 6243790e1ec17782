"""Opening what somebody may have put in the folder: a file, or nothing that a reader could wait for."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from ..errors import InvalidValue

# A pipe without a writer would keep a plain open() for ever, and the other ranks with it.
AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def opened(path: Path) -> BufferedReader:
    descriptor = os.open(path, AT_ONCE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidValue(f"{path.name} is no file; it is not what was saved: use another checkpoint")
    return os.fdopen(descriptor, "rb")
