"""A folder of per-rank files beside every Lightning checkpoint.

Rank 0 alone writes a ``.ckpt``, and no hook of a callback is told its path. Two methods of the trainer's
strategy are, on every rank: so these two are wrapped, for as long as the trainer lives.
"""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any, Protocol

from ..lane.failure import with_note
from ..session import Session

START_ANEW = "GradientComm(..., resume=False)"
AFTER_FAILURE = 60.0  # seconds to wait for the others: some of them may be gone


class Owner(Protocol):
    """The callback whose attachment is saved."""

    attachment: Session | None
    failure: BaseException | None
    """What ended training, while Lightning makes its last checkpoints of it."""


def folder_beside(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".gradlane")


def write_folders_beside(strategy: Any, owner: Owner) -> None:
    """Let ``strategy.save_checkpoint`` write the folder too, and ``remove_checkpoint`` remove it."""
    own = strategy.save_checkpoint, strategy.remove_checkpoint
    # An earlier fit, perhaps of another trainer, may have wrapped them: never twice.
    save_checkpoint, remove_checkpoint = vars(strategy).setdefault("_before_gradlane", own)
    find = weakref.ref(owner)

    def save(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        owner, path = find(), local_path(filepath)
        # Checkpoints of weights only have no callbacks in them, and nothing can go on from there.
        if owner is not None and path is not None and "callbacks" in checkpoint:
            # The folder first: a checkpoint that is there has one, whenever the run is cut off.
            _save_folder(owner, path)
        save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove(filepath: Any) -> None:
        remove_checkpoint(filepath)
        path = local_path(filepath)
        if strategy.is_global_zero and path is not None:
            shutil.rmtree(folder_beside(path), ignore_errors=True)

    strategy.save_checkpoint, strategy.remove_checkpoint = save, remove


def _save_folder(owner: Owner, checkpoint: Path) -> None:
    if owner.attachment is None:
        return
    timeout = owner.attachment.settings.timeout
    if owner.failure is not None:
        timeout = min(timeout or AFTER_FAILURE, AFTER_FAILURE)
    try:
        owner.attachment.save(folder_beside(checkpoint), timeout=timeout)
    except Exception as error:
        if owner.failure is None:
            raise
        # After an exception the ranks may be in different steps, or gone. It is what must be seen.
        why = str(error).partition("\n")[0]
        note = f"{checkpoint} is without the memory of the ranks ({why}); to resume from it: {START_ANEW}"
        with_note(owner.failure, note)


def local_path(path: object) -> Path | None:
    """None for s3:// and the like, where Lightning writes too: files of each rank need a file system."""
    text = str(path)
    return None if "://" in text else Path(text)
