"""``Attachment.load`` for a folder that belongs to a framework's checkpoint."""

from __future__ import annotations

from pathlib import Path

from ..errors import InvalidValue
from ..session import Session


def load_from(attachment: Session, folder: Path, *, start_empty: str) -> None:
    """Load the memory of each rank, on all ranks or on none. An error also says how to start with an empty
    memory: ``start_empty``."""
    try:
        attachment.load(folder)
    except InvalidValue as error:
        raise InvalidValue(
            f"{error}; the folder is part of the checkpoint and is copied along with it; to start with an "
            f"empty memory: {start_empty}"
        ) from error
