"""The library's logger, and where its warnings go when the application has said nothing.

A library usually adds a ``NullHandler``. That also silences Python's last resort, and nobody would hear that
a step was skipped or a rank is late. So warnings go to stderr, with the rank, unless a handler is there: of
the root logger (``logging.basicConfig()``), or of ``gradlane``.
"""

from __future__ import annotations

import logging
import os
import sys

NAME = "gradlane"


class LastResort(logging.Handler):
    """Writes warnings to stderr as long as nobody else would."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        if others_listen():
            return
        try:
            print(f"{NAME}: {_rank()}{self.format(record)}", file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001  as every handler does: a closed stderr ends no training
            self.handleError(record)


def others_listen() -> bool:
    """Whether any handler but ours gets what is logged; one that is meant to be silent is one, too."""
    logger: logging.Logger | None = log
    while logger is not None:
        if any(not isinstance(handler, LastResort) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _rank() -> str:
    """Looked up where it is loaded already: what never communicates must not import torch.distributed."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return f"rank {dist.get_rank()}: "
    rank = os.environ.get("RANK", "")
    return f"rank {rank}: " if rank.isdigit() else ""


log = logging.getLogger(NAME)
log.addHandler(LastResort())
