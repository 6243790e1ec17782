"""The tables of the page: one arm per row, and below it the detail of its status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arm_styles import ArmStyle
from .csv_link import csv_link


@dataclass(frozen=True)
class Row:
    """``brief`` is the detail of the status in one line, ``detail`` all its lines if there are more."""

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

    @property
    def csv(self) -> str:
        headings = ["arm", "status", *self.headings]
        return csv_link(headings, ([row.arm.name, row.status, *row.cells] for row in self.rows))


def status_row(arm: ArmStyle, status: str, detail: str, cells: Sequence[str]) -> Row:
    """A row whose brief line is the last line of a traceback, or the first line of any other detail."""
    lines = [line for line in detail.splitlines() if line.strip()]
    if not lines:
        return Row(arm, status, "", cells)
    brief = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return Row(arm, status, brief.strip(), cells, detail.strip() if len(lines) > 1 else "")
