"""An attachment's state in a folder: one file for every rank, because each has a memory of its own.

A framework's checkpoint is written by rank 0, or holds what rank 0 has; this folder lies in it or beside it.
Every rank calls, and each writes or reads its own file.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from ..attachment import Attachment
from ..errors import InvalidValue


def save(attachment: Attachment, folder: Path) -> None:
    """Every rank's file is there when it returns. A closed attachment still has its state."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder)
    unfinished = path.with_suffix(".unfinished")
    torch.save({"world": dist.get_world_size(), **attachment.state_dict()}, unfinished)
    os.replace(unfinished, path)
    dist.barrier()


def load(attachment: Attachment, folder: Path, *, without: str) -> None:
    """Go on where ``save`` was called; ``without`` says how to begin with an empty memory instead."""
    path = _path(folder)
    if not path.is_file():
        raise InvalidValue(
            f"the checkpoint has no {path}, so this rank's memory is not known; copy the folder along with "
            f"the checkpoint, or begin with an empty memory: {without}"
        )
    state = torch.load(path, weights_only=True)
    if state["world"] != dist.get_world_size():
        raise InvalidValue(
            f"{folder} was saved by {state['world']} ranks, this run has {dist.get_world_size()}; resume "
            f"with as many, or begin with an empty memory: {without}"
        )
    attachment.load_state_dict(state)


def _path(folder: Path) -> Path:
    return folder / f"rank{dist.get_rank()}.pt"
