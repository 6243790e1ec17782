"""The tables of the page: one arm per row, and below it what it has to say for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arm_styles import ArmStyle


@dataclass(frozen=True)
class Row:
    """``brief`` and ``detail`` are two halves of what went wrong: one line, and all the lines."""

    arm: ArmStyle
    status: str
    brief: str
    cells: Sequence[str]
    detail: str = ""


@dataclass(frozen=True)
class Table:
    caption: str
    headings: Sequence[str]
    rows: Sequence[Row]

    @property
    def with_status(self) -> bool:
        return any(row.status for row in self.rows)


def status_row(arm: ArmStyle, status: str, detail: str, cells: Sequence[str]) -> Row:
    """A detail of several lines gets the telling one in front: the last of a traceback, else the first."""
    lines = [line for line in detail.splitlines() if line.strip()]
    if not lines:
        return Row(arm, status, "", cells)
    brief = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return Row(arm, status, brief.strip(), cells, detail.strip() if len(lines) > 1 else "")
