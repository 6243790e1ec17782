"""Opens files of a checkpoint. Anything but a regular file is refused, since a reader could wait for it."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from ..errors import InvalidValue

# A plain open() of a pipe without a writer would block for ever, and the other ranks with it.
WITHOUT_BLOCKING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def opened(path: Path) -> BufferedReader:
    descriptor = os.open(path, WITHOUT_BLOCKING)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidValue(f"{path.name} is not a file; it is not what was saved: use another checkpoint")
    return os.fdopen(descriptor, "rb")
