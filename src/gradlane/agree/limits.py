"""What a user may say about waiting, and about nodes: checked before any rank waits for another."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.numbers import is_number, is_whole
from ..errors import InvalidValue, WrongType
from ..torch_internals import timeout_of_group

LONGEST_TIMEOUT = 30 * 86_400.0  # threads, stores and Gloo all count this far
LONGEST_PATIENCE = 10.0
OF_THE_GROUP = (
    "give its process group a longer timeout, which is the limit here: init_process_group(..., "
    "timeout=timedelta(hours=2)), or that of new_group"
)


class Limit(NamedTuple):
    """How long a rank waits for another, and what its user can do to make that longer."""

    seconds: float
    way_out: str = "raise timeout="

    def plus(self, seconds: float) -> Limit:
        return self._replace(seconds=self.seconds + seconds)


def limit_of(timeout: float | None, group: Any, device: torch.device) -> Limit:
    """What the user said; without that, what the process group itself waits for. A rank that is gone is
    noticed at once, and one that is late is named after ``patience``: only a stall is found so late."""
    return limit_of_group(group, device) if timeout is None else Limit(timeout)


def limit_of_group(group: Any, device: torch.device) -> Limit:
    if group.size() == 1:  # waits for itself, and for its disk
        return Limit(torchs_own(None).total_seconds())
    try:
        seconds = timeout_of_group(group, device).total_seconds()
    except (AttributeError, RuntimeError):  # a wrapper, or a backend that does not tell
        seconds = torchs_own(dist.get_backend(group)).total_seconds()
    return Limit(min(seconds, LONGEST_TIMEOUT), OF_THE_GROUP)


def torchs_own(backend: str | None) -> timedelta:
    """What torch gives a group if nothing is said: ten minutes with NCCL, else half an hour."""
    from torch.distributed import constants

    of_nccl = getattr(constants, "default_pg_nccl_timeout", None)
    if backend == "nccl" and isinstance(of_nccl, timedelta):
        return of_nccl
    default: timedelta = constants.default_pg_timeout
    return default


def patience(timeout: float) -> float:
    """Seconds of waiting after which somebody is late: well before it is an error."""
    return min(LONGEST_PATIENCE, timeout / 4)


def checked_timeout(given: float | timedelta | None) -> float | None:
    """In seconds; None stays None, which is the process group's own."""
    if given is None:
        return None
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if not is_number(seconds):
        raise WrongType(f"timeout={given!r} is no time; use a number of seconds, a timedelta, or None")
    if not seconds > 0:
        raise InvalidValue(
            f"timeout={seconds:g} leaves no time; use seconds above 0, or None for the process group's own"
        )
    if seconds > LONGEST_TIMEOUT:
        raise InvalidValue(f"timeout={seconds:g} never ends; use at most {LONGEST_TIMEOUT:.0f} s, 30 days")
    return float(seconds)


def checked_ranks_per_node(given: int | None) -> int | None:
    """That it divides the ranks is known when these have met."""
    if given is None or (is_whole(given) and given > 0):
        return given
    raise InvalidValue(f"ranks_per_node={given!r} is not possible; use a whole number from 1 up, or None")
