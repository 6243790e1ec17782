"""A rank of an arm in ``gradlane bench``: one measured step at each request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn.parallel import DistributedDataParallel

from ..core.events import Event
from ..errors import WrongState
from ..strategies.local_steps import LocalSteps
from ..strategies.mean import Mean
from ..strategies.text import describe
from ..torch_internals import call_after_backward
from .arms import Arm, check_arm
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


class CountedSteps(torch.optim.Optimizer):
    """An optimizer for local steps to count. Its step costs nothing, as the other arms have none."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Every step is the same."""


class BenchRank:
    """A step is forward and backward of the workload, without an optimizer.

    Of an arm with local steps a sample is a whole period, ``every`` steps and their rounds, per step.
    """

    def __init__(
        self, rank: int, arm: str, workload: Workload, bucket_mb: float | None, emulated: bool
    ) -> None:
        self._ddp = DistributedDataParallel(
            workload.model,
            bucket_cap_mb=bucket_mb,
            init_sync=False,  # all ranks were forked with the same weights
        )
        self._batch = workload.batch
        local = local_steps_of(arm)
        self._period = 1 if local is None else local.every
        self._counted = None if local is None else CountedSteps(self._ddp.parameters())
        self._arm = Arm(self._ddp, arm if local is None else describe(local), self._counted)
        self._interface = INTERFACE if emulated else LOOPBACK

    def __call__(self, order: object) -> Sample:
        if self._counted is None:
            return self._step()
        self._learn()
        return _per_step([self._step() for _ in range(self._period)])

    @torch.no_grad()
    def _learn(self) -> None:
        """Change the weights a little, outside of the measured time: a round of zeros would be no round."""
        for parameter in self._ddp.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-1e-4)

    def _step(self) -> Sample:
        self._ddp.zero_grad(set_to_none=False)
        counted, ledger = self._sent(), self._arm.sent_bytes
        cpu, start = time.process_time(), time.perf_counter()
        loss = loss_of(self._ddp(*self._batch))
        computed = _when_computed(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._counted is not None:
            self._counted.step()
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


def local_steps_of(arm: str) -> LocalSteps | None:
    """The local steps of an arm, without their warm-up."""
    strategy = check_arm(arm)
    if not isinstance(strategy, LocalSteps):
        return None
    return replace(strategy, warmup=0, first=Mean(), moments="own")


def _per_step(samples: Sequence[Sample]) -> Sample:
    """The mean of a period, without its events: they are of another time scale."""
    start, count = samples[0].start, len(samples)

    def mean(figure: Callable[[Sample], float]) -> float:
        return sum(map(figure, samples)) / count

    on_interface = [s.interface_bytes for s in samples if s.interface_bytes is not None]
    return Sample(
        start=start,
        computed=start + mean(lambda s: s.computed - s.start),
        end=start + mean(lambda s: s.end - s.start),
        cpu=mean(lambda s: s.cpu),
        ledger_bytes=round(mean(lambda s: s.ledger_bytes)),
        interface_bytes=round(sum(on_interface) / count) if len(on_interface) == count else None,
    )


def _when_computed(loss: torch.Tensor) -> list[float]:
    """A list that backward fills with the time at which it had computed everything: before DDP waits."""
    found: list[float] = []

    def at_start(gradient: torch.Tensor) -> None:
        # Autograd runs final callbacks in the order in which they were queued; this one is the first.
        call_after_backward(lambda: found.append(time.perf_counter()))

    loss.register_hook(at_start)  # type: ignore[no-untyped-call]
    return found
