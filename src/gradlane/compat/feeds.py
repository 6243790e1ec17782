"""The lanes of hooks and averagers: one for each process group and strategy, opened by the first use."""

import atexit
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._version import __version__
from ..agree.board import Board, Document
from ..agree.limits import limit_of_group
from ..core.strategy import Strategy
from ..feed.ddp import DdpFeed, NameOf
from ..feed.step import Step
from ..lane.open import open_lane
from ..strategies.text import describe
from ..telemetry.ledger import Ledger
from ..telemetry.sink import Observer
from .groups import checked_group, is_alive


class OpenFeed(NamedTuple):
    """An open feed. It keeps neither alive: a group may be destroyed, and a state dropped."""

    group: "weakref.ref[Any]"
    strategy: "weakref.ref[Strategy]"
    feed: DdpFeed
    board: Board
    ends: "list[weakref.finalize[..., Any]]"
    """Finalizers that end the lane when one of the two is collected."""

    def close(self) -> None:
        self.detach()
        self.feed.step.lane.close()

    def detach(self) -> None:
        for end in self.ends:
            end.detach()


_open: dict[tuple[int, int], OpenFeed] = {}


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
    opened = open_feed(
        checked_group(group, "the state of this hook"),
        bucket.buffer().device,
        strategy,
        {"hook": describe(strategy)},
        name_of=name_of,
        parameters=parameters,
        observers=observers,
    )
    return opened.feed


def open_feed(
    group: dist.ProcessGroup,
    device: torch.device,
    strategy: Strategy,
    must_agree: Document,
    *,
    name_of: NameOf = name_by_position,
    parameters: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    doing: str = "first use of a gradlane.compat hook",
) -> OpenFeed:
    """The same for any user of a lane. ``must_agree`` is compared over all ranks when it opens."""
    key = id(group), id(strategy)
    known = _open.get(key)
    if known is not None and known.group() is group and known.strategy() is strategy:
        return known
    _close_forgotten()
    ledger = Ledger(observers)
    opened = open_lane(
        group,
        device,
        ledger,
        {"version": __version__, **must_agree},
        parameters=list(parameters),
        limit=limit_of_group(group, device),  # that of torch's own hooks
        doing=doing,
    )
    step = Step(opened.lane, ledger, scopes=opened.scopes)
    ends = [weakref.finalize(whose, _drop, key) for whose in (group, strategy)]
    for end in ends:
        end.atexit = False  # ``close_all`` runs then
    feed = DdpFeed(step, name_of=name_of)
    _open[key] = OpenFeed(weakref.ref(group), weakref.ref(strategy), feed, opened.board, ends)
    return _open[key]


def _drop(key: tuple[int, int]) -> None:
    """Called by a finalizer when the group or the state was collected, so it must not wait."""
    if (known := _open.pop(key, None)) is not None:
        known.detach()
        known.feed.step.lane.leave()


def _close_forgotten() -> None:
    """Close lanes whose process group was destroyed, though something still refers to it."""
    for key, known in list(_open.items()):
        if not is_alive(known.group()):
            known.close()
            _open.pop(key, None)


def close_all() -> None:
    """Close the lanes of all hooks and averagers; ``gradlane.shutdown`` calls it."""
    for known in list(_open.values()):
        known.close()
    _open.clear()


atexit.register(close_all)  # for scripts that do not call it
