"""The JSON files of bench and train: where the run was made, and how a file is written."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import InvalidValue

FORMAT = 1


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to judge or repeat a run: time, command, versions, machine."""
    import torch

    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "gradlane": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def command_line() -> list[str]:
    return ["gradlane", *sys.argv[1:]]


def check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the run that fills it."""
    if path is None:
        return
    existed = path.exists()
    try:
        with open(path, "a", encoding="utf-8") as file:
            if not existed:  # a full disk accepts an empty file
                file.write(" " * 4096)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise InvalidValue(f"{path} cannot be written: {error.strerror}; name another file") from error
    finally:
        if not existed:
            path.unlink(missing_ok=True)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write all or nothing: an earlier file stays until the new one is complete."""
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise InvalidValue(f"{path} cannot be written: {error.strerror}; name another file") from error
