"""What stands in for torch's collectives inside of FSDP: the all-reduce over replicas, the reduce-scatter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..agree.limits import Limit
from ..errors import InvalidValue
from ..lane.perform import sever
from ..lane.thread import ThreadLane
from ..torch_internals import backend_of_group
from .fsdp import FsdpFeed, FsdpGroup
from .step import Step
from .torch_waits import TorchWaits

ALL_GATHER = "in FSDP's all-gather of weights"
REDUCE_SCATTER = "in FSDP's reduce-scatter of gradients"


class Carrier(dist.ProcessGroup):
    """In place of the process group of the replicas: FSDP's all-reduce of a group's gradient comes here.

    FSDP keeps it. It keeps neither the feed nor the session alive.
    """

    def __init__(self, replicas: Any, feed: FsdpFeed, group: FsdpGroup) -> None:
        super().__init__(replicas.rank(), replicas.size())  # type: ignore[call-arg]
        self._feed = weakref.ref(feed)
        self._of = group

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Done:  # type: ignore[override]
        sums = options.reduceOp == dist.ReduceOp.SUM
        if not sums and options.reduceOp != dist.ReduceOp.AVG:
            raise InvalidValue(f"FSDP reduces by {options.reduceOp}; gradlane knows a mean and a sum")
        if (feed := self._feed()) is not None:
            feed.all_reduce(self._of, tensors[0], sums=sums)
        return _Done()

    def getBackendName(self) -> str:
        return "gradlane"


class _Done:
    """A work that has nothing to wait for: FSDP's answer is there, or is filled in at the end of backward."""

    def wait(self) -> None: ...


class ScatterComm:
    """In place of FSDP's reduce-scatter. It allocates as the one before."""

    def __init__(self, before: Any, feed: FsdpFeed, group: FsdpGroup, place: int) -> None:
        self._before = before
        self._feed = weakref.ref(feed)
        self._of = group
        self._place = place

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._before.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op != dist.ReduceOp.AVG:
            raise InvalidValue(
                f"FSDP reduces by {op}, as for float16 or with set_gradient_divide_factor; on a model "
                "without replicas a strategy answers with the mean. Scale the loss instead, and use "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        if (feed := self._feed()) is not None:
            feed.reduce_scatter(self._of, output_tensor, input_tensor, self._place)


class FsdpWaits(TorchWaits):
    """The collectives that FSDP runs itself, on the process group of its shards."""

    def __init__(self, shards: Any, lane: ThreadLane, step: Step, *, limit: Limit, of_group: Limit) -> None:
        super().__init__(lane, step, limit=limit, of_group=of_group)
        self._shards = weakref.ref(shards)
        self.now = ""
        """Which of them, while one runs."""

    def _doing(self, error: BaseException | None = None) -> str | None:
        return self.now if self._inside or error is not None else None

    def _sever(self) -> None:
        if (shards := self._shards()) is not None:
            sever(backend_of_group(shards, torch.device("cpu")))


class WatchedComm:
    """One of FSDP's own collectives, watched."""

    def __init__(self, before: Any, waits: FsdpWaits, doing: str) -> None:
        self._before, self._waits, self._doing = before, waits, doing

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._before.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._waits.now = self._doing
        with self._waits.during():
            return self._before(*args, **kwargs)
