"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["fine", "note", "costs", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, what was found, and what to do about it."""

    topic: str
    level: Level
    """A ``note`` is worth knowing, ``costs`` is time or memory for nothing, and ``broken`` will not work."""
    what: str
    advice: str = ""
    who: str = ""
    """Which ranks, where not all."""


def fine(topic: str, what: str) -> Finding:
    return Finding(topic, "fine", what)
