"""A rank of an arm in ``gradlane bench``: one measured step at each request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch.nn.parallel import DistributedDataParallel

from ..core.events import Event
from ..errors import WrongState
from ..torch_internals import call_after_backward
from .arms import Arm
from .emulation import INTERFACE, LOOPBACK, sent_bytes
from .workload import Workload, loss_of


@dataclass(frozen=True)
class Sample:
    """One step of one rank. Times are ``time.perf_counter``, which all processes of a machine share."""

    start: float
    computed: float  # when backward had computed the last gradient
    end: float
    cpu: float
    ledger_bytes: int
    interface_bytes: int | None
    events: list[Event] = field(default_factory=list)


class BenchRank:
    """A step is forward and backward of the workload, without an optimizer."""

    def __init__(
        self, rank: int, arm: str, workload: Workload, bucket_mb: float | None, emulated: bool
    ) -> None:
        self._ddp = DistributedDataParallel(
            workload.model,
            bucket_cap_mb=bucket_mb,
            init_sync=False,  # all ranks were forked with the same weights
        )
        self._batch = workload.batch
        self._arm = Arm(self._ddp, arm)
        self._interface = INTERFACE if emulated else LOOPBACK

    def __call__(self, order: object) -> Sample:
        self._ddp.zero_grad(set_to_none=False)
        counted, ledger = self._sent(), self._arm.sent_bytes
        cpu, start = time.process_time(), time.perf_counter()
        loss = loss_of(self._ddp(*self._batch))
        computed = _when_computed(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        cpu = time.process_time() - cpu
        self._arm.step_done()
        after = self._sent()
        on_interface = None if counted is None or after is None else after - counted
        sent = self._arm.sent_bytes - ledger
        return Sample(start, computed[0], end, cpu, sent, on_interface, self._arm.take_events())

    def _sent(self) -> int | None:
        try:
            return sent_bytes(self._interface)
        except (OSError, WrongState):  # the system does not count
            return None


def _when_computed(loss: torch.Tensor) -> list[float]:
    """A list that backward fills with the time at which it had computed everything: before DDP waits."""
    found: list[float] = []

    def at_start(gradient: torch.Tensor) -> None:
        # Autograd runs final callbacks in the order in which they were queued; this one is the first.
        call_after_backward(lambda: found.append(time.perf_counter()))

    loss.register_hook(at_start)  # type: ignore[no-untyped-call]
    return found
