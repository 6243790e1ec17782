"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["fine", "note", "costs", "broken"]


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Level
    """``note``: worth knowing. ``costs``: time or memory, for nothing. ``broken``: it will not work."""
    what: str
    advice: str = ""
    who: str = ""
    """Which ranks, where not all."""


def fine(topic: str, what: str) -> Finding:
    return Finding(topic, "fine", what)
