"""Process groups as torch's names take them, and those that are made for some ranks of another one."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..agree.board import Board
from ..agree.limits import limit_of_group
from ..errors import WrongState, WrongType


def checked_group(group: object, what: str) -> dist.ProcessGroup:
    """The group itself; for None the default one. ``what`` says whose it is."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise WrongState(
                f"{what} is None, the default process group, and there is none; call "
                "torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise WrongType(f"{what} is a process group or None, got {type(group).__name__}")
    return group


def is_outside(group: object) -> bool:
    """Whether it is what ``new_group`` gives to a rank that is not in the group."""
    return group is not None and group == dist.GroupMember.NON_GROUP_MEMBER


def is_alive(group: Any) -> bool:
    """Whether the group exists and was not destroyed."""
    if group is None:  # collected; torch would take None for the default group
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return dist.is_initialized()


def block_group(group: dist.ProcessGroup, size: int, device: torch.device) -> dist.ProcessGroup:
    """The ``size`` consecutive ranks around this one, as ``dist.new_subgroups`` divides a group."""
    start = group.rank() // size * size
    return _part_of(group, range(start, start + size), device)


def machine_group(group: dist.ProcessGroup, board: Board, device: torch.device) -> dist.ProcessGroup:
    """The ranks on the machine of this one. torch divides by its number of GPUs, and fails where it has none.

    All ranks of the group must call it: they tell each other their hosts.
    """
    own = socket.gethostname()
    _, notes = board.agree("hosts", {"host": own}, doing="finding the ranks of this machine")
    return _part_of(group, [rank for rank, note in enumerate(notes) if note["host"] == own], device)


def _part_of(group: dist.ProcessGroup, chosen: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A new group of these ranks of a group, or the group itself. Only these ranks must call it."""
    ranks = dist.get_process_group_ranks(group)
    if len(chosen) == len(ranks):
        return group
    made = dist.new_group(
        [ranks[rank] for rank in chosen],
        timeout=timedelta(seconds=limit_of_group(group, device).seconds),
        use_local_synchronization=True,  # the others may be elsewhere
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
