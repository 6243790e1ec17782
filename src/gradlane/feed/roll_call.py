"""A roll call: all ranks see what each of them says, before anything else of a step is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Slot
from ..core.collectives import all_reduce
from ..core.strategy import Reduced, Strategy
from ..core.streams import on_device
from ..errors import RanksDisagree
from ..lane.watchdog import ROLL_CALL
from .step import Step

Objection = Callable[[Sequence[Sequence[int]]], str | None]
"""What differs between the ranks, or None; its argument has a row for each rank."""


@dataclass
class RollCall(Strategy):
    """All ranks raise the same error if what they say differs, or that of a rank that has one of its own."""

    what: str
    """What begins with it; for the message."""
    objection: Objection
    own_error: Exception | None = None
    _passed: bool = field(default=False, init=False)

    async def reduce(self, bucket: Bucket) -> Reduced:
        if self.own_error is not None:
            raise self.own_error
        table = await all_reduce(bucket.flat, op="sum", exact=True)
        if not table.is_meta and (objection := self.objection(table.view(bucket.world, -1).tolist())):
            raise RanksDisagree(f"{self.what} {bucket.step}: {objection}")
        self._passed = True
        return Reduced(table)

    def passes(self, step: Step, own: Sequence[int], device: torch.device) -> bool:
        """Call the roll and wait for it. If it fails the lane has the error, and ``step`` is broken off."""
        call_roll(step, self, own, device)
        step.lane.drain()
        if not self._passed:
            step.break_off()
        return self._passed


def call_roll(step: Step, roll_call: RollCall, own: Sequence[int], device: torch.device) -> None:
    """Begin to say ``own`` to all ranks; if it fails, so does the step."""
    table = torch.zeros(step.world, len(own), dtype=torch.int64)
    table[step.rank] = torch.tensor(own)
    submit_aside(step, roll_call, on_device(table.view(-1), device), "what each rank says")


def submit_aside(step: Step, strategy: Strategy, flat: Tensor, what: str) -> Future[Tensor]:
    """Give the lane a tensor that is not one of the step's buckets."""
    bucket = Bucket(
        flat=flat, layout=(Slot(what, flat.shape),), step=step.number, rank=step.rank, world=step.world,
        index=ROLL_CALL, is_last=False,
    )  # fmt: skip
    return step.lane.submit(strategy, bucket)
