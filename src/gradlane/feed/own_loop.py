"""The gradients of a loop without DDP: from ``p.grad`` to the lane and back, in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Slot
from ..core.collectives import all_reduce
from ..core.strategy import Reduced, Strategy
from ..core.streams import on_device
from ..fsdp_internals import local
from ..lane.watchdog import ROLL_CALL
from .copies_apart import CopiesApart
from .own_buckets import OwnBucket
from .step import Step


@dataclass
class _Presence(Strategy):
    """Which parameters have a gradient on at least one rank. An ``error`` fails the step on all ranks."""

    error: Exception | None = None

    async def reduce(self, bucket: Bucket) -> Reduced:
        if self.error is not None:
            raise self.error
        return Reduced(await all_reduce(bucket.flat, op="max", exact=True))


class OwnLoopFeed:
    """Fills buckets and submits them one after the other: the second is filled and encoded while the first
    travels."""

    def __init__(self, step: Step, *, tensor_parallel: bool = False) -> None:
        self.step = step
        self._tensor_parallel = tensor_parallel

    @torch.no_grad()
    def reduce(self, buckets: Sequence[OwnBucket], parameters: Sequence[Tensor], strategy: Strategy) -> None:
        """Write the mean to ``p.grad``. If the step fails this raises, and ``p.grad`` is as it was."""
        began = time.perf_counter()
        self.step.begin(strategy)
        present = [parameter.grad is not None for parameter in parameters]
        device = local(parameters[0]).device
        anywhere = self._exchange_presence(on_device(torch.tensor(present, dtype=torch.int32), device))
        answers: list[Future[Tensor]] = []
        for index, bucket in enumerate(buckets):
            try:
                flat = bucket.filled(parameters)
            except Exception as error:  # noqa: BLE001  the other ranks must not wait for this one
                self._break_off(error)
                break
            is_last = index == len(buckets) - 1
            working = CopiesApart(strategy, bucket.pieces) if self._tensor_parallel else strategy
            answers.append(self.step.submit(working, flat, bucket.layout, index=index, is_last=is_last))
        failure = self.step.wait()
        if failure is None:
            wanted = present if all(present) else [bool(some) for some in anywhere.wait().tolist()]
            for bucket, answer in zip(buckets, answers, strict=True):
                bucket.spread(answer.wait(), parameters, wanted)
        self._end(began)

    def refuse(self, error: Exception, strategy: Strategy) -> None:
        """Fail the step on all ranks with an error of this rank, and raise it."""
        began = time.perf_counter()
        self.step.begin(strategy)
        self._break_off(error)
        self.step.wait()
        self._end(began)

    def _break_off(self, error: Exception) -> None:
        self._exchange_presence(torch.zeros(0, dtype=torch.int32), error)
        self.step.break_off()

    def _end(self, began: float) -> None:
        # Backward was over before the step began, so no communication was hidden behind it.
        error = self.step.end(computed_at=began)
        if error is not None:
            raise error

    def _exchange_presence(self, present: Tensor, error: Exception | None = None) -> Future[Tensor]:
        """Tell all ranks which gradients are present (4 bytes each), since zeros count too; or an error."""
        bucket = Bucket(
            flat=present,
            layout=(Slot("which parameters have a gradient", present.shape),),
            step=self.step.number,
            rank=self.step.rank,
            world=self.step.world,
            index=ROLL_CALL,  # before all others; the user's strategy does not see it
            is_last=False,
        )
        return self.step.lane.submit(_Presence(error), bucket)
