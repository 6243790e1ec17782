"""Horizontal bars. The length is a percentage of the longest bar, so it fits a page of any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arm_styles import ArmStyle
from .chart import drawing, part, written

HEIGHT, THICKNESS = 16, 10


@dataclass(frozen=True)
class Bar:
    """One arm: its segments, each a class of the style sheet and a value, and the text beside the bar."""

    arm: ArmStyle
    segments: Sequence[tuple[str, float]]
    beside: str

    @property
    def length(self) -> float:
        return sum(value for _, value in self.segments)


@dataclass(frozen=True)
class DrawnBar:
    arm: ArmStyle
    beside: str
    svg: str


def draw(bars: Sequence[Bar], what: str, mark: float | None = None) -> list[DrawnBar]:
    """All on one scale; ``mark`` draws a line across every bar at that value."""
    longest = max([bar.length for bar in bars] + [mark or 0.0], default=0.0) or 1.0
    return [DrawnBar(bar.arm, bar.beside, _bar(bar, what, longest, mark)) for bar in bars]


def _bar(bar: Bar, what: str, longest: float, mark: float | None) -> str:
    title = f"{what}, {bar.arm.name}: {bar.beside}"
    svg = drawing(title, width="100%", height=str(HEIGHT), **{"class": "bar"})
    start = 0.0
    for style, value in bar.segments:
        if value > 0:
            size = {"x": _percent(start / longest), "width": _percent(value / longest)}
            part(svg, "rect", y=(HEIGHT - THICKNESS) / 2, height=THICKNESS, style=style, **size)
        start += value
    if mark is not None:
        x = _percent(mark / longest)
        part(svg, "line", x1=x, x2=x, y1=0, y2=HEIGHT, style="mark")
    return written(svg)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
