"""One step of one rank: compute, then exposed time; below it one row per bucket."""

from __future__ import annotations

from collections.abc import Sequence

from .axis import linear
from .chart import Node, drawing, part, written
from .documents import RankStep, Request
from .number_format import byte_size, duration

ROW, THICKNESS, QUEUED_THICKNESS, AXIS_HEIGHT = 18, 12, 4, 22


def length(steps: Sequence[RankStep]) -> float:
    """The length in seconds of a time axis for all these ranks."""
    ends = [step.end_s for step in steps] + [step.backward_s for step in steps]
    ends += [_end(request) for step in steps for request in step.requests]
    return max(ends, default=0.0)


def draw(step: RankStep, seconds: float) -> str:
    """A drawing as wide as the page; the names of the rows stand left of it, in its margin."""
    buckets = list(dict.fromkeys(request.bucket for request in step.requests))
    bottom = ROW * (1 + len(buckets))
    title = f"step {step.step} on rank {step.rank}: {duration(step.end_s)}, "
    title += f"of which {duration(_exposed(step))} exposed"
    svg = drawing(title, width="100%", height=str(bottom + AXIS_HEIGHT), **{"class": "timeline"})
    axis = linear([seconds], "s", from_zero=True)
    for value, text in axis.ticks(6):
        x = _percent(axis.at(value))
        anchor = "start" if value == 0 else "end" if axis.at(value) > 0.98 else "middle"
        part(svg, "line", x1=x, x2=x, y1=0, y2=bottom, style="grid")
        part(svg, "text", text, x=x, y=bottom + 15, text_anchor=anchor, style="tick")
    _name(svg, "compute", 0)
    _piece(svg, 0, 0.0, step.backward_s, axis.high, "compute")
    _piece(svg, 0, step.backward_s, _exposed(step), axis.high, "exposed")
    for row, bucket in enumerate(buckets, start=1):
        _name(svg, f"bucket {bucket}", row)
        for request in step.requests:
            if request.bucket == bucket:
                _request(svg, row, request, axis.high)
    return written(svg)


def _exposed(step: RankStep) -> float:
    return max(0.0, step.end_s - step.backward_s)


def _end(request: Request) -> float:
    return request.start_s + sum(request.seconds.values())


def _request(svg: Node, row: int, request: Request, seconds: float) -> None:
    group = part(svg, "g")
    spent = ", ".join(f"{phase} {duration(value)}" for phase, value in request.seconds.items())
    part(
        group,
        "title",
        f"bucket {request.bucket}, phase {request.phase}: {request.kind} of "
        f"{byte_size(request.payload_bytes)}; {spent}",
    )
    start = request.start_s
    for phase, value in request.seconds.items():
        _piece(group, row, start, value, seconds, phase)
        start += value


def _piece(parent: Node, row: int, start: float, size: float, seconds: float, style: str) -> None:
    if size > 0:
        extent = {"x": _percent(start / seconds), "width": _percent(size / seconds)}
        height = QUEUED_THICKNESS if style == "queued" else THICKNESS
        part(parent, "rect", y=ROW * row + (ROW - height) / 2, height=height, style=style, **extent)


def _name(svg: Node, text: str, row: int) -> None:
    part(svg, "text", text, x=-8, y=ROW * row + ROW / 2 + 4, text_anchor="end", style="row-name")


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
