"""A strategy at work on a DDP model. Made by ``attach`` in ddp.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .agree.limits import limit_of_group
from .core.strategy import Strategy
from .feed.ddp import DdpFeed
from .feed.ddp_waits import DdpWaits, watch_over
from .lane.open import Opened
from .lane.thread import ThreadLane
from .session import Session
from .settings import Settings
from .torch_internals import divides_by_active, rebuild_buckets


class Attachment(Session):
    """A strategy at work on a DDP model. Made by ``attach``; also a context manager that closes.

    After ``close`` the model stays as it is, but a backward of it raises until something is attached again.
    """

    kind = "attachment"
    again = "attach again"

    def __init__(self, ddp: DistributedDataParallel, strategy: Strategy, settings: Settings) -> None:
        self._ddp = weakref.ref(ddp)
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self.on_close: Callable[[], None] = _nothing
        self._watch_no_more: Callable[[], None] = _nothing
        self._waits: DdpWaits | None = None
        super().__init__(
            ddp, ddp.module, ddp.process_group, ddp.device, strategy, settings, doing="attach",
            must_agree={"wrapping": _wrapping(ddp)},
        )  # fmt: skip

    def close(self) -> None:
        self.on_close()
        self.on_close = _nothing
        self._watch_no_more()
        super().close()

    def _start_feed(self, opened: Opened) -> None:
        model = self._ddp
        self.feed = DdpFeed(
            self._step,
            name_of=partial(_name_of, self._names),  # not a method: that would keep this object alive
            divides_by_active=lambda: (ddp := model()) is not None and divides_by_active(ddp),
        )
        if isinstance(opened.lane, ThreadLane) and (ddp := model()) is not None:
            self._watch_over(ddp, opened.lane)

    def _watch_over(self, ddp: DistributedDataParallel, lane: ThreadLane) -> None:
        """DDP's own collectives: they have no part in the lane, but the same ranks to wait for."""
        of_group = limit_of_group(ddp.process_group, ddp.device)
        self._waits = DdpWaits(ddp, lane, self._step, limit=lane.board.limit, of_group=of_group)
        self._watch_no_more = watch_over(ddp, self._waits)
        lane.when_idle = self._waits.look
        self.feed.raises_at_once = self._waits.would_hang

    def _layout_to_come(self) -> list[list[str]]:
        with self._waits.during() if self._waits else nullcontext():
            ddp = self._ddp()
            self.feed.expect([] if ddp is None else rebuild_buckets(ddp))
        return super()._layout_to_come()

    def _synced(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and ddp.require_backward_grad_sync

    def _alike(self) -> dict[str, Tensor]:
        """But for those that DDP was told to leave alone."""
        ddp = self._ddp()
        ignored = () if ddp is None else ddp.parameters_to_ignore
        return {name: p for name, p in super()._alike().items() if name not in ignored}


def _name_of(names: dict[int, str], index: int, place: int, parameter: Tensor) -> str:
    return names.get(id(parameter)) or f"bucket{index}.{place}"


def _nothing() -> None:
    """Before ``attach`` has said what else is to be done at close."""


def _wrapping(ddp: DistributedDataParallel) -> str:
    """What decides DDP's buckets and their order: different ones would wait for each other."""
    return (
        f"bucket_cap_mb={ddp.bucket_bytes_cap / 2**20:g} find_unused_parameters={ddp.find_unused_parameters} "
        f"static_graph={ddp.static_graph}"
    )
