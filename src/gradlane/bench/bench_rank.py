"""A rank of an arm in ``gradlane bench``: one measured step at each request."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import WrongState
from ..strategies.local_steps import LocalSteps
from ..strategies.mean import Mean
from ..strategies.text import describe
from ..torch_internals import call_after_backward
from .arms import Arm, check_arm, is_hsdp
from .emulation import INTERFACE, LOOPBACK, sent_bytes
from .hsdp import HsdpArm
from .nodes import Nodes
from .sample import Sample, per_step
from .workload import Workload, loss_of


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
        self,
        rank: int,
        arm: str,
        workload: Workload,
        bucket_mb: float | None,
        emulated: bool,
        nodes: Nodes | None,
        in_a_row: int,
    ) -> None:
        self._batch = workload.batch
        self._in_a_row = in_a_row
        self._interface = INTERFACE if emulated else LOOPBACK
        self._period, self._counted = 1, None
        self._sharded = is_hsdp(arm)
        if self._sharded:
            assert nodes is not None
            self._arm: Arm | HsdpArm = HsdpArm(workload.model, arm, nodes)
            self._model = self._arm.model
            return
        self._model = DistributedDataParallel(
            workload.model,
            bucket_cap_mb=bucket_mb,
            init_sync=False,  # all ranks were forked with the same weights
        )
        if (local := local_steps_of(arm)) is not None:
            self._period, self._counted = local.every, CountedSteps(self._model.parameters())
            arm = describe(local)
        self._arm = Arm(self._model, arm, self._counted, nodes)

    def __call__(self, order: object) -> Sample:
        if self._counted is None:
            return self._steps_in_a_row()
        self._learn()
        return per_step([self._step() for _ in range(self._period)])

    def _steps_in_a_row(self) -> Sample:
        first = self._step()
        counted = [self._step() for _ in range(self._in_a_row - 1)]
        return per_step(counted) if counted else first

    @torch.no_grad()
    def _learn(self) -> None:
        """Change the weights a little, outside of the measured time: a round of zeros would be no round."""
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-1e-4)

    def _step(self) -> Sample:
        # FSDP would have to wait for an answer at once, to add it to a gradient that is there.
        self._model.zero_grad(set_to_none=self._sharded)
        arm = self._arm
        counted, ledger, uplink = self._sent(), arm.sent_bytes, arm.uplink_bytes
        cpu, start = time.process_time(), time.perf_counter()
        loss = loss_of(self._model(*self._batch))
        computed = _when_computed(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._counted is not None:
            self._counted.step()
        end = time.perf_counter()
        cpu = time.process_time() - cpu
        arm.step_done()
        after = self._sent()
        counter = None if counted is None or after is None else (counted, after)
        sent, across = arm.sent_bytes - ledger, arm.uplink_bytes - uplink
        return Sample(start, computed[0], end, cpu, sent, across, counter, arm.take_events())

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


def _when_computed(loss: torch.Tensor) -> list[float]:
    """A list that backward fills with the time at which it had computed everything: before DDP waits."""
    found: list[float] = []

    def at_start(gradient: torch.Tensor) -> None:
        # Autograd runs final callbacks in the order in which they were queued; this one is the first.
        call_after_backward(lambda: found.append(time.perf_counter()))

    loss.register_hook(at_start)  # type: ignore[no-untyped-call]
    return found
