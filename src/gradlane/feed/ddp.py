"""DDP's buckets become ours and go on the lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Layout
from ..core.collectives import Request, all_reduce
from ..core.running import intercept
from ..core.strategy import Reduced, Strategy
from ..errors import WrongState
from ..lane.base import Book, Lane, same
from ..torch_internals import current_backward
from .base import Feed, layout_of
from .ddp_internals import settle_after_backward
from .nonfinite import Guard
from .row_order import Order, order_of

NameOf = Callable[[int, int, Tensor], str]


class _Held(NamedTuple):
    """What is in one of DDP's buckets: whose gradients, and how they lie there."""

    who: tuple[int, ...]
    layout: Layout
    order: Order | None


class DdpFeed(Feed):
    """Between one DDP model and its lane: names, the end of backward, joined ranks."""

    def __init__(
        self,
        lane: Lane,
        book: Book,
        *,
        rank: int,
        sizes: Mapping[str, int],
        name_of: NameOf,
        count_active: Callable[[], bool] = lambda: False,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(lane, book, rank=rank, sizes=sizes, guard=guard)
        self._name_of = name_of
        self._count_active = count_active
        self.hopeless: Callable[[BaseException], bool] = lambda failure: False
        """Whether an error must not wait for the end of DDP's own backward, which would not come."""
        self._settled: int | None = None
        self._expected: list[list[str]] = []  # where DDP has rebuilt its buckets since the last step
        self._buckets_held: dict[int, _Held] = {}

    def reduce(self, given: dist.GradBucket, strategy: Strategy) -> Future[Tensor]:
        backward = current_backward()
        active = backward is not None
        if given.index() == 0:
            self.begin(strategy, joined=not active)
        flat = given.buffer()
        held = self._held(given)
        order = held.order
        straight = flat if order is None else order.straightened(flat)
        bucket = self.bucket(straight, held.layout, given.index(), given.is_last(), joined=not active)
        if active and backward != self._settled:
            # Once for each backward; a checkpointed module runs parts of it in one of their own.
            settle_after_backward(self.lane, lambda: not self.in_step, self._backward_ended, self.hopeless)
            self._settled = backward
        if bucket.is_last:
            self._expected = []
        # Outside of backward DDP waits for the future and shows its error.
        finish = same if order is None else partial(order.put_back, into=flat)
        answer = self.give(bucket, strategy, as_complex=flat.is_complex(), finish=finish, loud=not active)
        if bucket.is_last and not active:
            self._shadowed()
        return answer

    def _shadowed(self) -> None:
        """A joined rank has no backward at whose end it could count the step as the others do, and take part
        when they compare their weights. DDP would wait for the step here anyway."""
        self.lane.drain()
        failed = self.lane.take_failure() is not None  # DDP finds it in the futures
        trouble: BaseException | None = self._counted(failed)
        if not failed and self.drift is not None and self.drift.due(self.step - 1):
            trouble = self.drift.trouble(self.step - 1, joined=True) or trouble
        if trouble is not None:
            raise trouble

    def _wrapped(self, strategy: Strategy) -> Strategy:
        strategy = super()._wrapped(strategy)
        return _MeanOfActive(strategy) if self._count_active() else strategy

    def _backward_ended(self, computed: float, ended: float) -> BaseException | None:
        return self.step_ended(computed, ended, self.lane.take_failure())

    def _names(self) -> list[list[str]]:
        return self._expected or super()._names()

    def expect(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """The next step will have these parameters in its buckets; without any, the same as the last."""
        if buckets:
            self._expected = [
                [self._name_of(index, place, parameter) for place, parameter in enumerate(bucket)]
                for index, bucket in enumerate(buckets)
            ]

    def _held(self, given: dist.GradBucket) -> _Held:
        """Kept per bucket; DDP rebuilds its buckets once, and then they hold other parameters."""
        parameters = given.parameters()
        index = given.index()
        who = tuple(map(id, parameters))
        known = self._buckets_held.get(index)
        if known is not None and known.who == who:
            return known
        names = [self._name_of(index, place, parameter) for place, parameter in enumerate(parameters)]
        if known is not None:
            self._scratch.clear()  # made for buckets that are no more; what is under way keeps its own
        held = _Held(who, layout_of(names, parameters), order_of(parameters, given.buffer()))
        self._buckets_held[index] = held
        return held


@dataclass
class _MeanOfActive(Strategy):
    """For ``join(divide_by_initial_world_size=False)``: a mean divides by the ranks still training."""

    inner: Strategy

    async def reduce(self, bucket: Bucket) -> Reduced:
        active = torch.tensor([0 if bucket.joined else 1], device=bucket.flat.device)
        count = int(await all_reduce(active, op="sum"))
        if count == 0:
            raise WrongState("no rank is still training; leave the join() context")

        async def answer(request: Request) -> object:
            if request.op != "mean" or request.over != "world":
                return await request
            return await all_reduce(request.payloads[0][0].div_(count), op="sum")

        inner = self.inner.reduce(replace(bucket, sizes={**bucket.sizes, "world": count}))
        return await intercept(inner, answer)
