"""How many cores one rank has: those of its host, shared by the ranks there."""

from __future__ import annotations

import os
import socket

from ..agree.board import Board


def cores_of_a_rank(board: Board) -> float:
    """Collective. The fewest of all ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    _, notes = board.agree("cores", {"host": socket.gethostname(), "cores": cores}, doing="Auto")
    hosts = [note["host"] for note in notes]
    return min(float(note["cores"] / hosts.count(note["host"])) for note in notes)
