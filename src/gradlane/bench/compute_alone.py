"""Steps of compute alone: when DDP has each bucket ready, if nothing is communicated; and beside requests.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations by identity.
"""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..core.bucket import Bucket, Layout, Slot
from ..core.collectives import all_reduce
from ..core.strategy import Reduced, Strategy
from ..lane.base import completed_future
from ..lane.open import Opened
from ..lane.outside_steps import drain
from ..plan.beat import Beat
from ..plan.curves import SMALL
from ..plan.work import BucketWork, Phase
from ..torch_internals import call_after_backward
from .workload import Workload, loss_of


class Passes(Strategy):
    """For each bucket a pass over memory as an encoding makes it, and a small message: what a strategy costs
    beside compute, whose caches and processors it uses."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._seconds: dict[int, float] = {}

    async def reduce(self, bucket: Bucket) -> Reduced:
        if bucket.index not in self._kept:  # new pages in every step would cost more than the pass
            self._kept[bucket.index] = torch.zeros_like(bucket.flat)
        kept = self._kept[bucket.index]
        began = time.thread_time()
        kept.add_(bucket.flat)
        self._seconds[bucket.index] = time.thread_time() - began
        await all_reduce(bucket.flat.new_zeros(SMALL // 4, dtype=torch.float32), op="sum", exact=True)
        return Reduced(bucket.flat)

    @property
    def seconds(self) -> list[float]:
        """Of the passes of the last step."""
        return [seconds for _, seconds in sorted(self._seconds.items())]


def works_of_passes(seconds: Iterable[float]) -> list[BucketWork]:
    return [BucketWork((Phase("all_reduce", "world", SMALL, each),), 0.0) for each in seconds]


class ComputeAlone:
    """A DDP model whose hook communicates nothing, and notes when each bucket was ready.

    On request it takes a whole step, with torch's own all-reduce hook: to 1 % the time of DDP without a hook.
    Or one with ``passes`` through the lane.
    """

    def __init__(self, opened: Opened, workload: Workload, bucket_mb: float | None) -> None:
        self._opened = opened
        self._batch = workload.batch
        self._names = {id(p): name for name, p in workload.model.named_parameters()}
        self._model = DistributedDataParallel(workload.model, bucket_cap_mb=bucket_mb, init_sync=False)
        self._model.register_comm_hook(None, self._hook)
        self._ready: list[float] = []
        self._hook_of_step: Callable[[dist.GradBucket], torch.futures.Future[Tensor]] = self._note
        self._steps = 0
        self.passes = Passes()
        self.layouts: list[Layout] = []
        self.dtype = torch.float32

    def _hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return self._hook_of_step(bucket)

    def _note(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self._ready.append(time.perf_counter())
        self.dtype = bucket.buffer().dtype
        self.layouts.append(Layout(Slot(self._names[id(p)], p.shape) for p in bucket.parameters()))
        return completed_future(bucket.buffer())

    def _send_passes(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        scopes = self._opened.scopes
        return self._opened.lane.submit(
            self.passes,
            Bucket(
                flat=bucket.buffer(), layout=self.layouts[bucket.index()], step=self._steps, rank=scopes.rank,
                world=scopes.world, index=bucket.index(), is_last=bucket.is_last(), sizes=scopes.sizes,
                places=scopes.places,
            ),
        )  # fmt: skip

    def whole_step(self) -> float:
        """Seconds of a step of DDP."""
        return self._seconds(lambda bucket: allreduce_hook(self._model.process_group, bucket))

    def step_with_passes(self) -> float:
        """Seconds of a step with ``passes``. Take some steps of compute alone before."""
        self._steps += 1
        seconds = self._seconds(self._send_passes)
        drain(self._opened.lane)
        return seconds

    def _seconds(self, hook: Callable[[dist.GradBucket], torch.futures.Future[Tensor]]) -> float:
        self._model.zero_grad(set_to_none=False)
        self._hook_of_step = hook
        start = time.perf_counter()
        loss_of(self._model(*self._batch)).backward()  # type: ignore[no-untyped-call]
        self._hook_of_step = self._note
        return time.perf_counter() - start

    def step(self) -> Beat:
        self._model.zero_grad(set_to_none=False)
        self._ready, self.layouts = [], []
        computed: list[float] = []
        cpu, start = time.process_time(), time.perf_counter()
        loss = loss_of(self._model(*self._batch))
        loss.register_hook(  # type: ignore[no-untyped-call]
            lambda _: call_after_backward(lambda: computed.append(time.perf_counter()))
        )
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        cores = (time.process_time() - cpu) / (end - start)
        ready = self._ready
        gaps = tuple(after - before for before, after in pairwise(ready))
        # What DDP does after its wait is compute of the next step: nothing can hide behind it.
        return Beat(ready[0] - start + end - computed[0], gaps, max(computed[0] - ready[-1], 0.0), cores)
