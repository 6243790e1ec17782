"""The curves of a link, measured through the lane."""

from __future__ import annotations

from statistics import median
from typing import Any, cast

import torch

from ..core.collectives import Kind, Scope
from ..core.events import wire_bytes
from ..lane.gloo_scheduling import scheduled_as_usual
from ..lane.open import Opened
from .curves import DDPS, PRIMITIVES, RINGS, Curve, Curves, Primitive, calls
from .prober import LONG, Prober, Times
from .scale import of_nodes

# Payload bytes: from the message that ends a step to more than a bucket of DDP.
SIZES = (24, *(4096 * 4**power for power in range(7)), 1 << 25)
LARGE = 1 << 24  # bytes on the link
NARROW = (torch.bfloat16, torch.float16)


def measure_curves(
    opened: Opened, device: torch.device, *, nodes: bool = False, ddp_group: Any = None
) -> Curves:
    """Call it on all ranks of the lane, while nothing else runs; all ranks get the same figures.

    It takes some seconds, also on a link of 100 Mbit/s. ``nodes``: ranks of a node share its link to the
    others, and have curves of their own ``inside``. ``ddp_group``: the all-reduce of a DDP without gradlane
    is measured on it.
    """
    prober, sizes = Prober(opened, device, ddp_group), opened.scopes.sizes
    world, per_node = sizes["world"], sizes.get("node", 1)
    between = _measured(prober, "world", world)
    if ddp_group is not None:
        with scheduled_as_usual():
            between[DDPS] = _curve(prober, DDPS, "world", world)
    curves = Curves(world, between, narrow_s=_narrow(prober, between["all_reduce"]))
    if not nodes or not 1 < per_node < world or "cross" not in sizes:
        return curves
    return of_nodes(curves, per_node, _measured(prober, "node", per_node))


def _measured(prober: Prober, over: Scope, size: int) -> dict[Primitive, Curve]:
    return {primitive: _curve(prober, primitive, over, size) for primitive in PRIMITIVES}


def _curve(prober: Prober, primitive: Primitive, over: Scope, ranks: int) -> Curve:
    kind: Kind = "all_reduce" if primitive in RINGS else cast(Kind, primitive)
    found: list[tuple[int, Times]] = []
    for size in SIZES:
        elements = _elements(primitive, size, ranks)
        sent = wire_bytes(kind, 4 * elements, ranks)
        times = prober.times(primitive, over, elements)
        if not found or sent > found[-1][0]:
            found.append((sent, times))
        if times.seconds >= LONG:
            break
    issue = [times.issue / calls(kind, sent, ranks) for sent, times in found]
    fixed, per_byte = _line([(sent, times.cpu) for sent, times in found])
    points = [(float(sent), times.seconds) for sent, times in found]
    return Curve(_growing(points), median(issue), fixed, per_byte)


def _narrow(prober: Prober, curve: Curve) -> dict[str, float]:
    """By dtype: what each byte of a large all-reduce takes longer than one of fp32."""
    sent, world = min(curve.points[-1][0], LARGE), prober.opened.scopes.world
    payload = round(sent * world / (2 * max(world - 1, 1)))
    wide, *narrow = (
        prober.times("all_reduce", "world", payload // dtype.itemsize, dtype).seconds
        for dtype in (torch.float32, *NARROW)
    )
    return {
        str(dtype).removeprefix("torch."): max(seconds - wide, 0.0) / sent
        for dtype, seconds in zip(NARROW, narrow, strict=True)
    }


def _elements(primitive: Primitive, size: int, ranks: int) -> int:
    """Of fp32, so that about as many bytes are sent as by an all-reduce of ``size`` between two ranks."""
    if primitive in RINGS:
        return max(1, size // 4)
    each = max(1, size // 4 // max(ranks - 1, 1))
    return each if primitive == "all_gather" else each * ranks


def _growing(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """More bytes never take less time: what a smaller size took longer is noise."""
    grown: list[tuple[float, float]] = []
    least = float("inf")
    for sent, seconds in reversed(points):
        least = min(least, seconds)
        grown.append((sent, least))
    return tuple(reversed(grown))


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, neither below 0: through the smallest and the largest."""
    (small, low), (large, high) = points[min(1, len(points) - 1)], points[-1]
    slope = max(high - low, 0.0) / max(large - small, 1)
    return max(low - slope * small, 0.0), slope
