"""The lanes of bare hooks: one for each process group and strategy, opened when the first bucket comes."""

import atexit
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .._version import __version__
from ..agree.limits import limit_of_group
from ..core.strategy import Strategy
from ..errors import WrongType
from ..feed.ddp import DdpFeed, NameOf
from ..feed.step import Step
from ..lane.open import open_lane
from ..strategies.text import describe
from ..telemetry.ledger import Ledger
from ..telemetry.sink import Observer


class _Open(NamedTuple):
    """An open feed. It keeps neither alive: a group may be destroyed, and a state dropped."""

    group: "weakref.ref[Any]"
    strategy: "weakref.ref[Strategy]"
    feed: DdpFeed
    ends: "list[weakref.finalize[..., Any]]"
    """Finalizers that end the lane when one of the two is collected."""

    def close(self) -> None:
        self.detach()
        self.feed.step.lane.close()

    def detach(self) -> None:
        for end in self.ends:
            end.detach()


_open: dict[tuple[int, int], _Open] = {}


def name_by_position(index: int, position: int, parameter: Tensor) -> str:
    """Enough for a strategy without state. (DDP rebuilds its buckets after the first step.)"""
    return f"bucket{index}.{position}"


def feed_of(
    group: Any,
    bucket: dist.GradBucket,
    strategy: Strategy,
    *,
    name_of: NameOf = name_by_position,
    parameters: Sequence[str] = (),
    observers: Sequence[Observer] = (),
) -> DdpFeed:
    """The feed of this group and this very strategy. All ranks must have opened it with the same strategy
    and ``parameters``."""
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise WrongType(f"the state of this hook is a process group or None, got {type(group).__name__}")
    known = _open.get((id(group), id(strategy)))
    if known is not None and known.group() is group and known.strategy() is strategy:
        return known.feed
    _close_forgotten()
    ledger = Ledger(observers)
    device = bucket.buffer().device
    opened = open_lane(
        group,
        device,
        ledger,
        {"version": __version__, "hook": describe(strategy)},
        parameters=list(parameters),
        limit=limit_of_group(group, device),  # that of torch's own hooks
        doing="first use of a gradlane.compat hook",
    )
    step = Step(opened.lane, ledger, rank=opened.rank, sizes=opened.sizes)
    feed = DdpFeed(step, name_of=name_of)
    key = id(group), id(strategy)
    ends = [weakref.finalize(whose, _drop, key) for whose in (group, strategy)]
    for end in ends:
        end.atexit = False  # ``close_all`` runs then
    _open[key] = _Open(weakref.ref(group), weakref.ref(strategy), feed, ends)
    return feed


def _drop(key: tuple[int, int]) -> None:
    """Called by a finalizer when the group or the state was collected, so it must not wait."""
    if (known := _open.pop(key, None)) is not None:
        known.detach()
        known.feed.step.lane.leave()


def _close_forgotten() -> None:
    """Close lanes whose process group was destroyed, though something still refers to it."""
    for key, known in list(_open.items()):
        if not _alive(known.group()):
            known.close()
            _open.pop(key, None)


def _alive(group: Any) -> bool:
    if group is None:  # collected; torch would take None for the default group
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return dist.is_initialized()


def close_all() -> None:
    """Close the lanes of all hooks; ``gradlane.shutdown`` calls it."""
    for known in list(_open.values()):
        known.close()
    _open.clear()


atexit.register(close_all)  # for scripts that do not call it
