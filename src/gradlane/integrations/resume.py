"""``Attachment.load`` for a folder that belongs to a framework's checkpoint."""

from __future__ import annotations

from pathlib import Path

from ..errors import InvalidValue
from ..session import Session


def go_on(attachment: Session, folder: Path, *, without: str) -> None:
    """As ``attachment.load``, which refuses on all ranks or on none; ``without`` says how to begin with an
    empty memory instead."""
    try:
        attachment.load(folder)
    except InvalidValue as error:
        raise InvalidValue(
            f"{error}; the folder is part of the checkpoint and is copied along with it; to begin with an "
            f"empty memory: {without}"
        ) from error
