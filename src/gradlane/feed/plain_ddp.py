"""Steps that DDP reduces as it would without gradlane: on its own group, without a lane and a commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Layout
from ..core.events import Event, wire_bytes
from ..lane.perform import plain_mean
from ..telemetry.ledger import Ledger
from ..torch_internals import call_after_backward
from .step import Step


class PlainDdp:
    """Does what torch's ``allreduce_hook`` does, and counts the step.

    A step is not plain if something of the last one must be ended first, or if a resume wants other buckets.
    """

    def __init__(
        self,
        group: Any,
        step: Step,
        ledger: Ledger,
        wanted: Callable[[], bool],
        at_end: Callable[[], Callable[[], None] | None],
    ) -> None:
        """``at_end``: what is to be done after the backward of a plain step, if anything."""
        self._group, self._step, self._ledger = group, step, ledger
        self._wanted, self._at_end = wanted, at_end
        self._layouts: list[Layout] = []  # of this step so far

    def takes_step(self) -> bool:
        """Before the first bucket: whether this step is plain."""
        self._layouts = []
        return self._step.can_pass and self._wanted()

    def reduce(self, bucket: dist.GradBucket, layout: Layout) -> Future[Tensor]:
        buffer = bucket.buffer()
        raw = buffer.numel() * buffer.element_size()
        sent = wire_bytes("all_reduce", raw, self._group.size())
        event = Event(
            self._step.next, bucket.index(), 0, "all_reduce", "mean", "world", buffer.numel(), raw, sent,
            layout.names,
        )  # fmt: skip
        self._ledger.on_event(event)
        self._ledger.gradient(raw, sent, bucket.is_last())
        self._layouts.append(layout)
        if bucket.is_last():
            if (at_end := self._at_end()) is not None:
                call_after_backward(partial(call_after_backward, at_end))  # after DDP's own callback
            self._ledger.step_passed()
            self._step.passed(self._layouts)
        return plain_mean(self._group, buffer)

    def passed(self, raw_bytes: int) -> None:
        """Count a step of DDP without a hook."""
        sent = wire_bytes("all_reduce", raw_bytes, self._group.size())
        self._ledger.gradient(raw_bytes, sent, last=True)
        self._ledger.sent_elsewhere(raw_bytes, sent)
        self._ledger.step_passed()
        self._step.passed()
