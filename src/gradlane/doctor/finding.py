"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["fine", "note", "costs", "broken"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, and what to do about it."""

    topic: str
    level: Level
    """``note``: good to know. ``costs``: wastes time or memory. ``broken``: does not work."""
    what: str
    advice: str = ""
    who: str = ""
    """The ranks that it concerns, if not all."""


def fine(topic: str, what: str) -> Finding:
    return Finding(topic, "fine", what)
