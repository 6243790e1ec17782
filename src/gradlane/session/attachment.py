"""A strategy at work on a DDP model. ``attach`` in ddp.py makes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..agree.limits import limit_of_group
from ..core.strategy import Strategy
from ..feed.ddp import DdpFeed
from ..feed.ddp_waits import DdpWaits, watch_over
from ..feed.plain_ddp import PlainDdp
from ..feed.tensor_parallel import tensor_parallel_ranks
from ..lane.open import Opened
from ..lane.stream import StreamLane
from ..lane.thread import ThreadLane
from ..settings import Settings
from ..strategies.auto.strategy import Auto
from ..strategies.mean import Mean
from ..torch_internals import (
    divides_by_active,
    in_join,
    rebuild_buckets,
    unwrap_pre_forward,
    wrap_pre_forward,
)
from .base import Session, weakly
from .choosing import Choosing, exchange_now, is_tunable, tune_by_trials
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
        self.feed.plain = self._plain = PlainDdp(
            ddp.process_group, self._step, self._ledger, weakly(self._is_plain, default=False),
            weakly(self._at_end_of_plain, default=None),
        )  # fmt: skip
        self._choosing: Choosing | None = None

    def begin_without_hook(self, ddp: DistributedDataParallel, needs_hook: Callable[[], None]) -> bool:
        """Watch DDP as it is, and call ``needs_hook`` when a strategy is wanted; whether that is possible.
        Collective."""
        strategy, lane = self.strategy, self._opened.lane
        if not isinstance(strategy, Auto) or not is_tunable(strategy, self._scopes):
            return False
        if not isinstance(lane, ThreadLane) or self._tensor_parallel or ddp.find_unused_parameters:
            return False
        self._choosing = Choosing(
            ddp, strategy, self._step, self._opened, self._ledger, passed=self._plain.passed,
            needs_hook=needs_hook,
        )  # fmt: skip
        return True

    def _is_plain(self) -> bool:
        """Whether the next step needs no strategy: DDP's own mean is what is wanted."""
        ddp, strategy = self._ddp(), self.strategy
        if not isinstance(strategy, Auto | Mean) or ddp is None or in_join(ddp) or self._tensor_parallel:
            return False
        if isinstance(strategy, Auto):
            self._ownership.used = True
            tune_by_trials(strategy, self._scopes, self.step, ddp.device)
            strategy.course.begin(self.step)
            return strategy.course.is_plain
        checks = self.settings.nonfinite != "propagate" or self.settings.observers  # timings are the lane's
        return type(strategy) is Mean and not checks

    def _loaded(self) -> None:
        if self._choosing is not None:
            self._choosing.loaded()

    def _swapped(self) -> None:
        if self._choosing is not None:
            self._choosing.end()

    def _at_end_of_plain(self) -> Callable[[], None] | None:
        strategy, ddp = self.strategy, self._ddp()
        if ddp is not None and isinstance(strategy, Auto) and strategy.course.due:
            return partial(exchange_now, self._opened, strategy, self._step.next, ddp.device)
        return None

    def _working(self, strategy: Strategy) -> Strategy:
        return across_replicas(strategy) if self._tensor_parallel else strategy

    def close(self) -> None:
        self.on_close()
        self.on_close = _nothing
        if self._choosing is not None:
            self._choosing.stop()
        self._stop_watching()
        super().close()

    def _start_feed(self, opened: Opened) -> None:
        model, self._opened = self._ddp, opened
        self.feed = DdpFeed(
            self._step,
            name_of=partial(_name_of, self._names),  # not a method: that would keep this object alive
            divides_by_active=lambda: (ddp := model()) is not None and divides_by_active(ddp),
            tensor_parallel=self._tensor_parallel,
        )
        ddp = model()
        if isinstance(opened.lane, ThreadLane) and ddp is not None:
            self._watch_ddp(ddp, opened.lane)
        if isinstance(opened.lane, StreamLane) and ddp is not None:
            self._step.may_postpone = True
            finish = weakly(self._finish_step, default=None)
            wrap_pre_forward(ddp, partial(_after, finish))
            self._stop_watching = partial(_stop_waiting, weakref.ref(ddp))

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


@contextmanager
def _after(finish: Callable[[], None]) -> Iterator[None]:
    """The gradients of this forward may be added to those of the last step: its outcome must be known."""
    finish()
    yield


def _stop_waiting(model: weakref.ref[DistributedDataParallel]) -> None:
    if (ddp := model()) is not None:
        unwrap_pre_forward(ddp)


def _nothing() -> None:
    """Until ``attach`` sets what else is to do at close."""


def _wrapping(ddp: DistributedDataParallel) -> str:
    """The options that decide DDP's buckets and their order: ranks that differ would wait for each other."""
    return (
        f"bucket_cap_mb={ddp.bucket_bytes_cap / 2**20:g} find_unused_parameters={ddp.find_unused_parameters} "
        f"static_graph={ddp.static_graph}"
    )
