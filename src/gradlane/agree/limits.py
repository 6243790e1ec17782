"""How long ranks wait for each other, and the user's settings for it, checked before any rank waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..core.numbers import is_number, is_whole
from ..errors import InvalidValue, WrongType
from ..torch_internals import timeout_of_group

LONGEST_TIMEOUT = 30 * 86_400.0  # seconds that threads, stores and Gloo can all count
LONGEST_LATE_AFTER = 10.0  # seconds
OF_THE_GROUP = (
    "give its process group a longer timeout, which is the limit here: init_process_group(..., "
    "timeout=timedelta(hours=2)), or that of new_group"
)


class Limit(NamedTuple):
    """How long a rank waits for another, and how the user can make that longer."""

    seconds: float
    way_out: str = "raise timeout="

    def plus(self, seconds: float) -> Limit:
        return self._replace(seconds=self.seconds + seconds)


def limit_of(timeout: float | None, group: Any, device: torch.device) -> Limit:
    """The user's timeout, or that of the process group. Only a stalled rank is found so late: a rank that is
    gone is noticed at once, and a late rank is logged after ``late_after`` seconds."""
    return limit_of_group(group, device) if timeout is None else Limit(timeout)


def limit_of_group(group: Any, device: torch.device) -> Limit:
    if group.size() == 1:  # it waits for its disk only
        return Limit(torch_default_timeout(None).total_seconds())
    try:
        seconds = timeout_of_group(group, device).total_seconds()
    except (AttributeError, RuntimeError):  # a wrapper, or a backend that does not tell
        seconds = torch_default_timeout(dist.get_backend(group)).total_seconds()
    return Limit(min(seconds, LONGEST_TIMEOUT), OF_THE_GROUP)


def torch_default_timeout(backend: str | None) -> timedelta:
    """torch's default for a process group: ten minutes with NCCL, else half an hour."""
    from torch.distributed import constants

    of_nccl = getattr(constants, "default_pg_nccl_timeout", None)
    if backend == "nccl" and isinstance(of_nccl, timedelta):
        return of_nccl
    default: timedelta = constants.default_pg_timeout
    return default


def late_after(timeout: float) -> float:
    """Seconds of waiting after which a rank is logged as late: long before the timeout."""
    return min(LONGEST_LATE_AFTER, timeout / 4)


def checked_timeout(timeout: float | timedelta | None) -> float | None:
    """In seconds; None stays None and means the timeout of the process group."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not is_number(seconds):
        raise WrongType(f"timeout={timeout!r} is no time; use a number of seconds, a timedelta, or None")
    if not seconds > 0:
        raise InvalidValue(
            f"timeout={seconds:g} leaves no time; use seconds above 0, or None for the process group's own"
        )
    if seconds > LONGEST_TIMEOUT:
        raise InvalidValue(f"timeout={seconds:g} never ends; use at most {LONGEST_TIMEOUT:.0f} s, 30 days")
    return float(seconds)


def checked_ranks_per_node(count: int | None) -> int | None:
    """Whether it divides the number of ranks is checked when the lane opens."""
    if count is None or (is_whole(count) and count > 0):
        return count
    raise InvalidValue(f"ranks_per_node={count!r} is not possible; use a whole number from 1 up, or None")
