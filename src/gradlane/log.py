"""The library's logger, and a handler for applications that configure no logging.

A library usually adds a ``NullHandler``. That would also silence Python's last resort handler, and nobody
would see that a step was skipped or that a rank is late. So warnings go to stderr, with the rank, unless the
root logger (``logging.basicConfig()``) or ``gradlane`` has a handler.
"""

from __future__ import annotations

import logging
import os
import sys

NAME = "gradlane"


class LastResort(logging.Handler):
    """Writes warnings to stderr as long as no other handler gets them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        if has_other_handlers():
            return
        try:
            print(f"{NAME}: {_rank()}{self.format(record)}", file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001  as every handler does: a closed stderr ends no training
            self.handleError(record)


def has_other_handlers() -> bool:
    """Whether another handler gets the records; a ``NullHandler`` counts."""
    logger: logging.Logger | None = log
    while logger is not None:
        if any(not isinstance(handler, LastResort) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _rank() -> str:
    """From torch.distributed if that is imported already: a tool that never communicates does not need it."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return f"rank {dist.get_rank()}: "
    rank = os.environ.get("RANK", "")
    return f"rank {rank}: " if rank.isdigit() else ""


log = logging.getLogger(NAME)
log.addHandler(LastResort())
