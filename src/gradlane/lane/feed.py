"""DDP's buckets become ours and go on the lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Slot
from ..core.collectives import Request, all_reduce
from ..core.events import StepTimes, wire_bytes
from ..core.running import intercept
from ..core.scratch import Scratch
from ..core.strategy import Reduced, Strategy
from ..errors import WrongState
from .backward import current_backward, settle_after_backward
from .base import Lane, same
from .book import Book
from .regroup import Regrouping

NameOf = Callable[[int, int, Tensor], str]


class Feed:
    """Between one DDP model and its lane: names, steps, joined ranks, complex gradients."""

    def __init__(
        self,
        lane: Lane,
        book: Book,
        *,
        rank: int,
        sizes: Mapping[str, int],
        name_of: NameOf,
        count_active: Callable[[], bool] = lambda: False,
    ) -> None:
        self.lane = lane
        self.book = book
        self.step = 0
        self.in_step = False
        self._rank = rank
        self._sizes = sizes
        self._world = sizes["world"]
        self._name_of = name_of
        self._count_active = count_active
        self._settled: int | None = None
        self._buckets = 0  # of the last whole step
        self._expected: list[list[str]] = []  # where DDP has rebuilt its buckets since the last step
        self._way: Lane | Regrouping = lane  # of the buckets; another one after a resume, for a step
        self._ready = 0.0  # when the first bucket of this step was
        self._scratch: dict[int, Scratch] = {}  # by the address of DDP's bucket
        self._layouts: dict[int, tuple[tuple[int, ...], tuple[Slot, ...]]] = {}

    def reduce(self, given: dist.GradBucket, strategy: Strategy) -> Future[Tensor]:
        if not self.in_step:
            self._ready = time.perf_counter()
        backward = current_backward()
        active = backward is not None
        bucket = self._bucket(given, joined=not active)
        if active and backward != self._settled:
            # Once for each backward; a checkpointed module runs parts of it in one of their own.
            settle_after_backward(self.lane, lambda: not self.in_step, self._step_ended)
            self._settled = backward
        self.in_step = not bucket.is_last
        if bucket.is_last:
            self._buckets, self._expected = bucket.index + 1, []
        self.step += bucket.is_last
        if self._count_active():
            strategy = _MeanOfActive(strategy)
        raw = bucket.flat.numel() * bucket.flat.element_size()
        self.book.gradient(raw, wire_bytes("all_reduce", raw, self._world), bucket.is_last)
        finish = torch.view_as_complex if given.buffer().is_complex() else None
        return self._way.submit(
            strategy,
            bucket,
            finish=same if finish is None else lambda mean: finish(mean.view(-1, 2)),
            loud=not active,  # outside of backward DDP waits for the future and shows its error
        )

    def _step_ended(self, computed: float, ended: float) -> None:
        self.book.step_ended(StepTimes(self.step - 1, self._ready, computed, ended))

    def layout(self) -> list[list[str]]:
        """The names of the parameters in each bucket, as strategies see them; none before the first step."""
        if isinstance(self._way, Regrouping):
            return self._way.layout
        if self._expected:
            return self._expected
        return [[slot.name for slot in self._layouts[index][1]] for index in range(self._buckets)]

    def expect(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """The next step will have these parameters in its buckets; without any, the same as the last."""
        if buckets:
            self._expected = [
                [self._name_of(index, place, parameter) for place, parameter in enumerate(bucket)]
                for index, bucket in enumerate(buckets)
            ]

    def go_to(self, step: int, layout: Sequence[Sequence[str]] = ()) -> None:
        """Number the next step anew, as a resumed run does; and begin with the buckets of ``layout``."""
        self.step = step
        self._way = Regrouping(self.lane, layout, self._go_straight) if layout else self.lane
        self.lane.forget_failure()  # that step may have failed in this process, in another life

    def _go_straight(self) -> None:
        self._way = self.lane

    def _bucket(self, given: dist.GradBucket, *, joined: bool) -> Bucket:
        flat = given.buffer()
        layout = self._layout(given)
        return Bucket(
            flat=torch.view_as_real(flat).view(-1) if flat.is_complex() else flat,
            layout=layout,
            step=self.step,
            rank=self._rank,
            world=self._world,
            index=given.index(),
            is_last=given.is_last(),
            joined=joined,
            sizes=self._sizes,
            scratch=self._scratch.setdefault(flat.data_ptr(), Scratch()) if not flat.is_sparse else None,
        )

    def _layout(self, given: dist.GradBucket) -> tuple[Slot, ...]:
        """Kept per bucket; DDP rebuilds its buckets once, and then they hold other parameters.

        A complex parameter is real pairs here, whether DDP's buffer is of complex numbers or of pairs.
        """
        parameters = given.parameters()
        index = given.index()
        who = tuple(map(id, parameters))
        known = self._layouts.get(index)
        if known is not None and known[0] == who:
            return known[1]
        layout = tuple(
            Slot(self._name_of(index, place, parameter), _as_pairs(parameter))
            for place, parameter in enumerate(parameters)
        )
        if known is not None:
            self._scratch.clear()  # made for buckets that are no more; what is under way keeps its own
        self._layouts[index] = (who, layout)
        return layout


def _as_pairs(parameter: Tensor) -> torch.Size:
    return torch.Size((*parameter.shape, 2)) if parameter.is_complex() else parameter.shape


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
