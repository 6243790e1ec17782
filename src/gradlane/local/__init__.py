"""Ranks as local processes: for tests and first experiments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..errors import GradlaneError
from .rank_process import tell
from .ranks import Ranks

__all__ = ["RankFailed", "run_ranks", "tell"]


class RankFailed(GradlaneError, RuntimeError):
    """A rank raised, died, or did not finish in time; the message has the failure of every rank."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: object,
    deadline: float = 60.0,
    on_report: Callable[[object], None] | None = None,
    init: bool = True,
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world`` forked processes; their results, in rank order.

    Each has a Gloo process group, unless ``init`` is False: then its second argument is the path of a file
    store. If a rank raises, ``RankFailed`` has what every rank said.

    Args:
        deadline: seconds after which every rank reports what its lanes wait for, and is killed.
        on_report: is called here with each ``x`` that a rank gives to ``tell(x)``.
        prepare: is called first in each process, with its rank.
    """
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    ranks = Ranks(function, world, *args, init=init, deadline=deadline, prepare=prepare)
    try:
        end = time.monotonic() + deadline + 5  # the ranks watch the deadline themselves
        while ranks.unfinished() and time.monotonic() < end:
            for rank, kind, value in ranks.messages(end):
                if kind == "result":
                    results[rank] = value
                elif kind == "failure":
                    failures[rank] = value
                    end = min(end, time.monotonic() + 10)  # the others should notice soon
                    break
                elif on_report is not None:
                    on_report(value)
        failures |= dict.fromkeys(ranks.unfinished(), "did not finish")
    finally:
        ranks.close()
    if failures:
        details = "\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures))
        raise RankFailed(f"{len(failures)} of {world} ranks failed\n{details}")
    return [results[rank] for rank in range(world)]
