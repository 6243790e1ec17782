"""A strategy at work on a DDP model. ``attach`` in ddp.py makes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..agree.limits import limit_of_group
from ..core.strategy import Strategy
from ..feed.ddp import DdpFeed
from ..feed.ddp_waits import DdpWaits, watch_over
from ..feed.tensor_parallel import tensor_parallel_ranks
from ..lane.open import Opened
from ..lane.thread import ThreadLane
from ..settings import Settings
from ..torch_internals import divides_by_active, rebuild_buckets
from .base import Session
from .tensor_parallel import across_replicas, refuse_options


class Attachment(Session):
    """A strategy at work on a DDP model. Made by ``attach``; also a context manager that closes.

    After ``close`` the model stays as it is, but its backward raises until something is attached again.
    """

    reopen = "attach again"

    def __init__(self, ddp: DistributedDataParallel, strategy: Strategy, settings: Settings) -> None:
        self._ddp = weakref.ref(ddp)
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self.on_close: Callable[[], None] = _nothing
        self._stop_watching: Callable[[], None] = _nothing
        self._waits: DdpWaits | None = None
        ranks = tensor_parallel_ranks(ddp.module.parameters(), ddp.process_group)
        self._tensor_parallel = ranks is not None
        group, mesh = ranks or (ddp.process_group, None)
        refuse_options(settings, self._tensor_parallel)
        super().__init__(
            ddp, ddp.module, group, ddp.device, self._working(strategy), settings, doing="attach",
            must_agree={"wrapping": _wrapping(ddp)}, mesh=mesh,
        )  # fmt: skip

    def _working(self, strategy: Strategy) -> Strategy:
        return across_replicas(strategy) if self._tensor_parallel else strategy

    def close(self) -> None:
        self.on_close()
        self.on_close = _nothing
        self._stop_watching()
        super().close()

    def _start_feed(self, opened: Opened) -> None:
        model = self._ddp
        self.feed = DdpFeed(
            self._step,
            name_of=partial(_name_of, self._names),  # not a method: that would keep this object alive
            divides_by_active=lambda: (ddp := model()) is not None and divides_by_active(ddp),
            tensor_parallel=self._tensor_parallel,
        )
        if isinstance(opened.lane, ThreadLane) and (ddp := model()) is not None:
            self._watch_ddp(ddp, opened.lane)

    def _watch_ddp(self, ddp: DistributedDataParallel, lane: ThreadLane) -> None:
        """DDP's own collectives are not the lane's, but they wait for the same ranks."""
        of_group = limit_of_group(ddp.process_group, ddp.device)
        self._waits = DdpWaits(ddp, lane, self._step, limit=lane.board.limit, of_group=of_group)
        self._stop_watching = watch_over(ddp, self._waits)
        lane.when_idle = self._waits.check
        self.feed.raises_at_once = self._waits.would_hang

    def _next_layout(self) -> list[list[str]]:
        with self._waits.during() if self._waits else nullcontext():
            ddp = self._ddp()
            self.feed.expect([] if ddp is None else rebuild_buckets(ddp))
        return super()._next_layout()

    def _synced(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and ddp.require_backward_grad_sync

    def _replicated(self) -> dict[str, Tensor]:
        """Without the parameters that DDP was told to ignore."""
        ddp = self._ddp()
        ignored = () if ddp is None else ddp.parameters_to_ignore
        return {name: p for name, p in super()._replicated().items() if name not in ignored}


def _name_of(names: dict[int, str], index: int, position: int, parameter: Tensor) -> str:
    return names.get(id(parameter)) or f"bucket{index}.{position}"


def _nothing() -> None:
    """Until ``attach`` sets what else is to do at close."""


def _wrapping(ddp: DistributedDataParallel) -> str:
    """The options that decide DDP's buckets and their order: ranks that differ would wait for each other."""
    return (
        f"bucket_cap_mb={ddp.bucket_bytes_cap / 2**20:g} find_unused_parameters={ddp.find_unused_parameters} "
        f"static_graph={ddp.static_graph}"
    )
