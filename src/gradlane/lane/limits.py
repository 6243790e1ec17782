"""What a user may say about waiting, and about nodes: checked before any rank waits for another."""

from __future__ import annotations

from datetime import timedelta

from ..core.numbers import is_number, is_whole
from ..errors import InvalidValue, WrongType

LONGEST_TIMEOUT = 30 * 86_400.0  # threads, stores and Gloo all count this far


def checked_timeout(given: float | timedelta) -> float:
    """In seconds."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if not is_number(seconds):
        raise WrongType(f"timeout={given!r} is no time; use a number of seconds, or a timedelta")
    if not seconds > 0:
        raise InvalidValue(f"timeout={seconds:g} leaves no time; use seconds above 0, 120 by default")
    if seconds > LONGEST_TIMEOUT:
        raise InvalidValue(f"timeout={seconds:g} never ends; use at most {LONGEST_TIMEOUT:.0f} s, 30 days")
    return float(seconds)


def checked_ranks_per_node(given: int | None) -> int | None:
    """That it divides the ranks is known when these have met."""
    if given is None or (is_whole(given) and given > 0):
        return given
    raise InvalidValue(f"ranks_per_node={given!r} is not possible; use a whole number from 1 up, or None")
