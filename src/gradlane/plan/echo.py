"""The work of a strategy on the buckets of a model: bytes by dry run, times by the echo driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.bucket import Layout
from ..core.events import Event
from ..core.scopes import Scopes
from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..simulate.dryrun import events_of
from ..strategies.local_steps import LocalSteps
from ..strategies.text import parse
from .echo_driver import EchoBucket
from .echo_times import STEP, times_of
from .work import BucketWork, Phase

CPU = torch.device("cpu")


def work_of(
    strategy: Strategy | str,
    layouts: Sequence[Layout],
    scopes: Scopes,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[BucketWork, ...]:
    """What a strategy does with each bucket, as rank 0 of the world; the strategy itself does not change."""
    if isinstance(strategy, str):
        strategy = parse(strategy)
    if isinstance(strategy, LocalSteps):
        raise InvalidValue(
            "LocalSteps sends nothing in most steps, so it has no typical one; plan the strategy inside it"
        )
    scopes = _of_rank_0(scopes)
    return _works(strategy, layouts, scopes, dtype, times_of(strategy, layouts, scopes, dtype, device))


def bytes_alone(
    strategy: Strategy, layouts: Sequence[Layout], scopes: Scopes, dtype: torch.dtype = torch.float32
) -> tuple[BucketWork, ...]:
    """What a strategy sends, as if its own work took no time: no forecast of that is too slow."""
    return _works(strategy, layouts, _of_rank_0(scopes), dtype, [EchoBucket() for _ in layouts])


def _of_rank_0(scopes: Scopes) -> Scopes:
    """So that all ranks get the same bytes."""
    return Scopes(scopes.sizes, dict.fromkeys(scopes.sizes, 0))


def _works(
    strategy: Strategy,
    layouts: Sequence[Layout],
    scopes: Scopes,
    dtype: torch.dtype,
    timed: Sequence[EchoBucket],
) -> tuple[BucketWork, ...]:
    events: list[list[Event]] = [[] for _ in layouts]
    for event in events_of(strategy, layouts, scopes, dtype, STEP):
        events[event.bucket].append(event)
    return tuple(
        _joined(mine, times, sum(slot.numel for slot in layout) * dtype.itemsize)
        for mine, times, layout in zip(events, timed, layouts, strict=True)
    )


def _joined(events: Sequence[Event], times: EchoBucket, dense_bytes: int) -> BucketWork:
    """Exact bytes, and the times of a bucket that asked for the same; extra phases took no time there."""
    seconds = [phase.encode_s for phase in times.phases] + [0.0] * len(events)
    late = [phase.after_all for phase in times.phases] + [False] * len(events)
    dtypes = [phase.dtype for phase in times.phases] + ["float32"] * len(events)
    phases = [
        Phase(event.kind, event.over, event.payload_bytes, seconds[number], late[number], dtypes[number])
        for number, event in enumerate(events)
    ]
    extra = sum(phase.encode_s for phase in times.phases[len(events) :])
    return BucketWork(tuple(phases), times.decode_s + extra, dense_bytes)
