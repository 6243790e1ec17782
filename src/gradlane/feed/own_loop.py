"""The gradients of a loop without DDP: from ``p.grad`` to the lane and back, all in one call."""

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
from ..lane.watchdog import ROLL_CALL
from .base import Feed
from .own_buckets import Parcel


@dataclass
class _RollCall(Strategy):
    """Which parameters have a gradient on some rank. What is ``wrong`` here fails the step on all ranks."""

    wrong: Exception | None = None

    async def reduce(self, bucket: Bucket) -> Reduced:
        if self.wrong is not None:
            raise self.wrong
        return Reduced(await all_reduce(bucket.flat, op="max", exact=True))


class OwnFeed(Feed):
    """Fills parcels and gives them to the lane one after the other; while the first is on its way the second
    is filled and encoded."""

    @torch.no_grad()
    def reduce(self, parcels: Sequence[Parcel], parameters: Sequence[Tensor], strategy: Strategy) -> None:
        """Write the mean to ``p.grad``. If the step fails this raises, and ``p.grad`` is as it was."""
        began = time.perf_counter()
        self.begin(strategy)
        present = [parameter.grad is not None for parameter in parameters]
        anywhere = self._call_the_roll(torch.tensor(present, dtype=torch.int32, device=parameters[0].device))
        answers: list[Future[Tensor]] = []
        for index, parcel in enumerate(parcels):
            try:
                flat = parcel.filled(parameters)
            except Exception as error:  # noqa: BLE001  the other ranks must not wait for this one
                self._lose(error)
                break
            bucket = self.bucket(flat, parcel.layout, index, index == len(parcels) - 1)
            answers.append(self.give(bucket, strategy, as_complex=flat.is_complex()))
        self.lane.drain()
        failure = self.lane.take_failure()
        if failure is None:
            wanted = present if all(present) else [bool(some) for some in anywhere.wait().tolist()]
            for parcel, answer in zip(parcels, answers, strict=True):
                parcel.spread(answer.wait(), parameters, wanted)
        self._end(began, failure)

    def refuse(self, wrong: Exception, strategy: Strategy) -> None:
        """Raise what is wrong on this rank; all ranks hear of it, and the step is lost on all."""
        began = time.perf_counter()
        self.begin(strategy)
        self._lose(wrong)
        self.lane.drain()
        self._end(began, self.lane.take_failure())

    def _lose(self, wrong: Exception) -> None:
        """Let the lane tell all ranks, in its order."""
        self._call_the_roll(torch.zeros(0, dtype=torch.int32), wrong)
        self.step += 1
        self.in_step = False

    def _end(self, began: float, failure: BaseException | None) -> None:
        # Backward was over before this began, so that nothing of it was hidden.
        trouble = self.step_ended(began, time.perf_counter(), failure)
        if trouble is not None:
            raise trouble

    def _call_the_roll(self, present: Tensor, wrong: Exception | None = None) -> Future[Tensor]:
        """4 bytes for each parameter: without them nobody could tell a gradient of zeros from none."""
        bucket = Bucket(
            flat=present,
            layout=(Slot("which parameters have a gradient", present.shape),),
            step=self.step,
            rank=self._rank,
            world=self._world,
            index=ROLL_CALL,  # before all others, and not one that strategies see
            is_last=False,
        )
        return self.lane.submit(_RollCall(wrong), bucket)
