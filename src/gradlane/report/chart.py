"""Line charts as SVG: axes, ticks, thin lines for single seeds, the arm's letter at the end of its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

from .arm_styles import ArmStyle
from .axis import Axis

WIDTH, HEIGHT = 360, 236  # as wide as the page on a small screen: text keeps its size there
LEFT, RIGHT, TOP, BOTTOM = 44, 28, 10, 38  # room for "100 ms", and for half of "10 Gbit/s"
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
LETTER_HEIGHT, LETTER_WIDTH = 11.0, 15.0

Vertex = tuple[float, float | None]  # the line has a gap where the second is None
Node = ElementTree.Element


@dataclass(frozen=True)
class Line:
    arm: ArmStyle
    mean: Sequence[Vertex]
    seeds: Sequence[Sequence[Vertex]]


def part(parent: Node, tag: str, text: str = "", **attributes: object) -> Node:
    """Add a child element. ``style`` is its class; ``_`` in a name stands for ``-``. Text is escaped."""
    named = {
        ("class" if key == "style" else key.replace("_", "-")): value for key, value in attributes.items()
    }
    written = {
        key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in named.items()
    }
    child = ElementTree.SubElement(parent, tag, written)
    child.text = text or None
    return child


def drawing(title: str, **attributes: str) -> Node:
    """An ``svg`` element with a title for screen readers."""
    svg = Node("svg", {"role": "img", "aria-label": title, **attributes})
    part(svg, "title", title)
    return svg


def written(svg: Node) -> str:
    return ElementTree.tostring(svg, encoding="unicode")


def line_chart(
    title: str,
    x: Axis,
    y: Axis,
    x_title: str,
    lines: Sequence[Line],
    target: float | None,
    marks: Sequence[tuple[ArmStyle, float, float]] = (),
) -> str:
    """``target`` is a level, ``marks`` are points on lines."""
    svg = drawing(title, viewBox=f"0 0 {WIDTH} {HEIGHT}", **{"class": "line-chart"})
    _axes(svg, x, y, x_title)
    # The inner svg clips at the axes: a diverging arm must not compress the others.
    plot = part(svg, "svg", x=LEFT, y=TOP, width=PLOT_WIDTH + 3, height=PLOT_HEIGHT, style="plot")
    if target is not None:
        height = _down(y, target) - TOP
        part(plot, "line", x1=0, x2=PLOT_WIDTH, y1=height, y2=height, style="target")
    for line in lines:
        group = part(plot, "g", style=line.arm.style)
        part(group, "title", line.arm.name)
        for seed in line.seeds:
            part(group, "path", d=_path(x, y, seed), style="seed")
        part(group, "path", d=_path(x, y, line.mean), style="mean")
    for arm, across, down in marks:
        part(
            plot, "circle", cx=_across(x, across) - LEFT, cy=_down(y, down) - TOP, r=3.4,
            style=f"crossing {arm.style}",
        )  # fmt: skip
    _letters(svg, x, y, lines)
    return written(svg)


def _across(axis: Axis, value: float) -> float:
    return LEFT + PLOT_WIDTH * axis.at(value)


def _down(axis: Axis, value: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - axis.at(value))


def _axes(svg: Node, x: Axis, y: Axis, x_title: str) -> None:
    bottom = TOP + PLOT_HEIGHT
    for value, text in y.ticks():
        height = _down(y, value)
        part(svg, "line", x1=LEFT, x2=LEFT + PLOT_WIDTH, y1=height, y2=height, style="grid")
        part(svg, "text", text, x=LEFT - 5, y=height + 3.5, text_anchor="end", style="tick")
    for value, text in x.ticks():
        across = _across(x, value)
        part(svg, "line", x1=across, x2=across, y1=bottom, y2=bottom + 4, style="axis")
        part(svg, "text", text, x=across, y=bottom + 15, text_anchor="middle", style="tick")
    part(svg, "line", x1=LEFT, x2=LEFT + PLOT_WIDTH, y1=bottom, y2=bottom, style="axis")
    middle = LEFT + PLOT_WIDTH / 2
    part(svg, "text", x_title, x=middle, y=HEIGHT - 6, text_anchor="middle", style="axis-title")


def _path(x: Axis, y: Axis, vertices: Sequence[Vertex]) -> str:
    """A path through all vertices, in the coordinates of the plot, with gaps."""
    moves: list[str] = []
    pen_down = False
    for across, down in vertices:
        if down is None or not x.shows(across):
            pen_down = False
            continue
        moves.append(f"{'L' if pen_down else 'M'}{_across(x, across) - LEFT:.1f} {_down(y, down) - TOP:.1f}")
        pen_down = True
    return "".join(moves)


def _letters(svg: Node, x: Axis, y: Axis, lines: Sequence[Line]) -> None:
    """A dot at the end of each line and its letter to the right; letters that collide are moved apart."""
    ends: list[tuple[ArmStyle, float, float]] = []
    for line in lines:
        shown = [(across, down) for across, down in line.mean if down is not None and x.shows(across)]
        if shown:
            height = min(max(_down(y, shown[-1][1]), TOP), TOP + PLOT_HEIGHT)
            ends.append((line.arm, _across(x, shown[-1][0]), height))
    ends.sort(key=lambda end: end[2])
    heights = [height for _, _, height in ends]
    for _ in range(len(ends) ** 2):  # each round moves colliding pairs a little apart
        for one, other in combinations(range(len(ends)), 2):
            near = abs(ends[one][1] - ends[other][1]) < LETTER_WIDTH
            overlap = LETTER_HEIGHT - (heights[other] - heights[one])
            if near and overlap > 0.1:
                heights[one] -= overlap / 2
                heights[other] += overlap / 2
    for at in reversed(range(len(ends))):  # letters below the axis move up again, and push others
        below = [heights[i] for i in range(at + 1, len(ends)) if abs(ends[i][1] - ends[at][1]) < LETTER_WIDTH]
        heights[at] = min(heights[at], TOP + PLOT_HEIGHT - 6, *(height - LETTER_HEIGHT for height in below))
    for (arm, across, down), height in zip(ends, heights, strict=True):
        part(svg, "circle", cx=across, cy=down, r=2.6, style=f"end {arm.style}")
        part(svg, "text", arm.letter, x=across + 6, y=height + 3.5, style="letter")
