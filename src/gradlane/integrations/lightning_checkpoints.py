"""A folder of per-rank files beside every Lightning checkpoint.

Rank 0 alone writes a ``.ckpt``, and no hook of a callback is told its path. Two methods of the trainer's
strategy are, on every rank: so these two are wrapped, for as long as the trainer lives.
"""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any, Protocol

from ..attachment import Attachment


class Owner(Protocol):
    """The callback whose attachment is saved."""

    attachment: Attachment | None


def folder_beside(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".gradlane")


def write_folders_beside(strategy: Any, owner: Owner) -> None:
    """Let ``strategy.save_checkpoint`` write the folder too, and ``remove_checkpoint`` remove it."""
    own = strategy.save_checkpoint, strategy.remove_checkpoint
    # An earlier fit, perhaps of another trainer, may have wrapped them: never twice.
    save_checkpoint, remove_checkpoint = vars(strategy).setdefault("_before_gradlane", own)
    find = weakref.ref(owner)

    def save(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        owner = find()
        attachment = None if owner is None else owner.attachment
        # Checkpoints of weights only have no callbacks in them, and nothing can go on from there.
        if attachment is not None and "callbacks" in checkpoint and is_local(filepath):
            # The folder first: a checkpoint that is there has one, whenever the run is cut off.
            attachment.save(folder_beside(Path(filepath)))
        save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove(filepath: Any) -> None:
        remove_checkpoint(filepath)
        if strategy.is_global_zero and is_local(filepath):
            shutil.rmtree(folder_beside(Path(filepath)), ignore_errors=True)

    strategy.save_checkpoint, strategy.remove_checkpoint = save, remove


def is_local(path: object) -> bool:
    """Lightning also writes to s3:// and the like; files of each rank are written to file systems only."""
    return "://" not in str(path)
