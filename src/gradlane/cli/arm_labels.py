"""Names of arms in a table: letters, and a list of them, where the names would not fit."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase


def labels(names: Sequence[str], room: int) -> tuple[list[str], list[str]]:
    """A label for each name, and the lines that explain them; none if the names fit into ``room``."""
    if max(map(len, names), default=0) <= room or len(names) > len(ascii_uppercase):
        return list(names), []
    letters = list(ascii_uppercase[: len(names)])
    return letters, [f"{letter}  {name}" for letter, name in zip(letters, names, strict=True)]
