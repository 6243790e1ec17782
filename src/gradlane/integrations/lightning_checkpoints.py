"""A folder of per-rank files beside every Lightning checkpoint.

Only rank 0 writes a ``.ckpt``, and Lightning passes its path to no hook of a callback. But it calls two
methods of the trainer's strategy with that path, on every rank. These two are wrapped for as long as the
trainer lives, and so is a third, which gives the weights for the ``.ckpt``: those that all ranks agreed on.
"""

from __future__ import annotations

import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..lane.failure import with_note
from ..session import Session
from .agreed_weights import AgreedWeights, copied

START_EMPTY = "GradientComm(..., resume=False)"
AFTER_FAILURE = 60.0  # seconds to wait for the others: some of them may be gone


class Owner(Protocol):
    """The callback whose attachment is saved."""

    attachment: Session | None
    agreed: AgreedWeights
    in_training: bool
    """The ranks may have weights of their own, which differ."""
    failure: BaseException | None
    """The exception that ended training; Lightning may save checkpoints after it."""


def folder_beside(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + ".gradlane")


def write_folders_beside(strategy: Any, owner: Owner) -> None:
    """Make ``strategy.save_checkpoint`` write the folder too, and ``remove_checkpoint`` remove it."""
    own = strategy.save_checkpoint, strategy.remove_checkpoint, strategy.lightning_module_state_dict
    # An earlier fit, perhaps of another trainer, may have wrapped them already.
    before: tuple[Any, Any, Any] = vars(strategy).setdefault("_before_gradlane", own)
    save_checkpoint, remove_checkpoint, state_dict = before
    find = weakref.ref(owner)

    def agreed_state() -> dict[str, Any]:
        owner = find()
        return state_dict() if owner is None else _agreed_state(owner, state_dict)

    def save(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        owner, path = find(), local_path(filepath)
        # A checkpoint of weights only has no callbacks, and a run cannot resume from it.
        if owner is not None and path is not None and "callbacks" in checkpoint:
            # The folder first: then every checkpoint that exists has one, even if the run is killed here.
            _save_folder(owner, path)
        save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove(filepath: Any) -> None:
        remove_checkpoint(filepath)
        path = local_path(filepath)
        if strategy.is_global_zero and path is not None:
            shutil.rmtree(folder_beside(path), ignore_errors=True)

    strategy.save_checkpoint, strategy.remove_checkpoint = save, remove
    strategy.lightning_module_state_dict = agreed_state


def _agreed_state(owner: Owner, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    session = owner.attachment
    if session is None or session.gives != "weights" or not owner.in_training:
        return state_dict()
    try:
        with owner.agreed.shown(session, closed_too=True):
            return copied(state_dict())
    except Exception:  # of a round under way
        if owner.failure is None:
            raise
        return state_dict()


def _save_folder(owner: Owner, checkpoint: Path) -> None:
    if owner.attachment is None:
        return
    timeout = owner.attachment.settings.timeout
    if owner.failure is not None:
        timeout = min(timeout or AFTER_FAILURE, AFTER_FAILURE)
    try:
        with owner.agreed.hidden():
            owner.attachment.save(folder_beside(checkpoint), timeout=timeout)
    except Exception as error:
        if owner.failure is None:
            raise
        # After an exception the ranks may be in different steps, or gone. The user must see the exception.
        why = str(error).partition("\n")[0]
        note = f"{checkpoint} has no memory of the ranks ({why}); to resume from it: {START_EMPTY}"
        with_note(owner.failure, note)


def local_path(path: object) -> Path | None:
    """None for s3:// and the like. Lightning writes there, but the files of each rank need a file system."""
    text = str(path)
    return None if "://" in text else Path(text)


def warn_of_remote_checkpoints(trainer: Any) -> None:
    for callback in trainer.checkpoint_callbacks:
        path = getattr(callback, "dirpath", None)
        if path and local_path(path) is None:
            warnings.warn(
                f"checkpoints go to {path}, and the memory of each rank to file systems only: it will not be "
                f"saved; to resume, use {START_EMPTY}",
                stacklevel=3,
            )
