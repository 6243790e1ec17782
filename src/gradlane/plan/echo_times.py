"""Times of a strategy's work on the buckets of a model, by the echo driver."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from ..core.bucket import Layout, Slot
from ..core.scopes import Scopes, scopes_of
from ..core.strategy import Strategy
from ..core.world_change import Expected
from ..simulate.buckets import nodes_of
from ..simulate.dryrun import emptied
from .echo_driver import Echo, EchoBucket

STEP = 10_000  # after any warm-up
MOST_ROUNDS, LEAST_ROUNDS = 7, 3  # beside the first one, which allocates
SECONDS = 0.4  # for one strategy; after that the least number must do
TIMED = 3  # buckets of different sizes; the others are in proportion
MOST_ELEMENTS = 6_553_600  # of a timed bucket: 25 MiB
FEW, MANY = 8, 64  # ranks; a larger world is timed with these two, and goes on in a straight line
FEW_NODES, MANY_NODES = 4, 8  # the same for nodes of several ranks


def times_of(
    strategy: Strategy, layouts: Sequence[Layout], scopes: Scopes, dtype: torch.dtype, device: torch.device
) -> list[EchoBucket]:
    world, node = scopes.world, scopes.sizes.get("node", scopes.world)
    in_nodes = 1 < node < world
    unit = node if in_nodes else 1
    few, many = (FEW_NODES, MANY_NODES) if in_nodes else (FEW, MANY)
    count = world // unit
    if count <= many:
        return _timed(strategy, layouts, scopes, dtype, device)
    low, high = (
        _timed(
            strategy,
            layouts,
            scopes_of(0, nodes_of(n * unit, None if node == world else node)),
            dtype,
            device,
        )
        for n in (few, many)
    )
    steps = (count - many) / (many - few)
    return [_extrapolated(a, b, steps) for a, b in zip(low, high, strict=True)]


def _timed(
    strategy: Strategy, layouts: Sequence[Layout], scopes: Scopes, dtype: torch.dtype, device: torch.device
) -> list[EchoBucket]:
    """Times of each bucket: of a few by the echo driver, of the others in proportion to their elements."""
    sizes = [sum(slot.numel for slot in layout) for layout in layouts]
    by_size = {size: layout for size, layout in zip(sizes, layouts, strict=True) if size}
    distinct = sorted(by_size)
    if len(distinct) > TIMED:
        last = len(distinct) - 1
        distinct = sorted({distinct[round(place * last / (TIMED - 1))] for place in range(TIMED)})
    chosen = [_cut(by_size[size]) for size in distinct]
    if not chosen:
        return [EchoBucket() for _ in layouts]
    echoes = _typical(strategy, chosen, scopes, dtype, device)
    known = [(sum(slot.numel for slot in layout), echo) for layout, echo in zip(chosen, echoes, strict=True)]
    return [_scaled(*min(known, key=lambda pair: abs(pair[0] - size)), size) for size in sizes]


def _typical(
    strategy: Strategy, layouts: Sequence[Layout], scopes: Scopes, dtype: torch.dtype, device: torch.device
) -> list[EchoBucket]:
    """The median of several rounds, phase by phase."""
    own = copy.deepcopy(emptied(strategy))
    own.enter(scopes, {slot.name: Expected(slot.shape, dtype) for layout in layouts for slot in layout})
    echo = Echo(own, layouts, scopes, dtype, device)
    echo.step(STEP)
    rounds: list[list[EchoBucket]] = []
    began = time.monotonic()
    while len(rounds) < MOST_ROUNDS:
        # Some strategies alternate; STEP itself is even.
        rounds.append(echo.step(STEP + 2 * len(rounds) + 2))
        if len(rounds) >= LEAST_ROUNDS and time.monotonic() - began > SECONDS:
            break
    return [_median(bucket) for bucket in zip(*rounds, strict=True)]


def _median(rounds: Sequence[EchoBucket]) -> EchoBucket:
    phases = [
        replace(same[0], encode_s=median(phase.encode_s for phase in same))
        for same in zip(*(bucket.phases for bucket in rounds), strict=True)
    ]
    return EchoBucket(phases, median(bucket.decode_s for bucket in rounds))


def _scaled(elements: int, echo: EchoBucket, size: int) -> EchoBucket:
    factor = size / elements
    phases = [replace(phase, encode_s=phase.encode_s * factor) for phase in echo.phases]
    return EchoBucket(phases, echo.decode_s * factor)


def _extrapolated(few: EchoBucket, many: EchoBucket, steps: float) -> EchoBucket:
    def beyond(low: float, high: float) -> float:
        return high + max(high - low, 0.0) * steps

    phases = [
        replace(b, encode_s=beyond(a.encode_s, b.encode_s))
        for a, b in zip(few.phases, many.phases, strict=True)
    ]
    return EchoBucket(phases, beyond(few.decode_s, many.decode_s))


def _cut(layout: Layout) -> Layout:
    """Fewer rows of each parameter, where the bucket is too large to be timed."""
    whole = sum(slot.numel for slot in layout)
    if whole <= MOST_ELEMENTS:
        return layout
    share = MOST_ELEMENTS / whole
    return Layout(
        Slot(name, torch.Size([max(1, int(shape[0] * share)), *shape[1:]]) if shape else shape)
        for name, shape in layout
    )
