"""torch's ``PostLocalSGDState``: over which ranks gradients are averaged, and from when on."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.strategy import Strategy
from ..errors import InvalidValue, WrongType
from ..feed.ddp import DdpFeed
from ..feed.step import OVER
from ..lane.base import completed_future
from ..log import log
from ..strategies.cast import Cast
from ..strategies.describe import describe
from ..strategies.mean import Mean
from .feeds import OpenFeed, open_feed
from .groups import checked_group, is_alive, machine_group
from .model_averager import checked_count

Wires = tuple[torch.dtype, ...]


class PostLocalSGDState:
    """Options and iteration of ``post_localSGD_hook``, for one DDP model.

    Gradients are averaged over ``process_group`` (None: the default group) in the first
    ``start_localSGD_iter`` iterations. Afterwards they are averaged over ``subgroup``, or, without
    ``post_local_gradient_allreduce``, not at all. None as ``subgroup`` means the ranks of the same machine,
    by host name. What differs from torch:

    - ``state_dict`` and ``load_state_dict`` keep the iteration, so that a resume does not warm up again.
    - ``iter`` goes on counting after the warm-up.
    - Options are compared over all ranks in the first iteration.

    ``gradlane.local_steps(model, optimizer, "Mean()", every=..., warmup=start_localSGD_iter,
    inside="NodeMean()")`` is this hook and its averager in one.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = checked_count("start_localSGD_iter", start_localSGD_iter, 0)
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        if not isinstance(post_local_gradient_allreduce, bool):
            raise WrongType(
                f"post_local_gradient_allreduce is a {type(post_local_gradient_allreduce).__name__}; "
                "use True or False"
            )
        self._iter = 0
        self._strategies: dict[Wires, Strategy] = {}
        self._machine: dist.ProcessGroup | None = None  # what a subgroup of None stands for

    @property
    def iter(self) -> int:
        """The iteration that the next backward will be. It may be set."""
        return self._iter

    @iter.setter
    def iter(self, iteration: int) -> None:
        self._iter = checked_count("iter", iteration, 0)

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count the iteration if this is its last bucket."""
        if bucket.is_last():
            self._iter += 1
            if self._iter == self.start_localSGD_iter:
                log.info("local SGD begins after %d iterations", self._iter)

    def state_dict(self) -> dict[str, int]:
        return {"iter": self._iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. The options are those of this state."""
        if "iter" not in state:
            raise InvalidValue("the state lacks iter; pass what PostLocalSGDState.state_dict() gave")
        self.iter = state["iter"]

    def __getstate__(self) -> dict[str, Any]:
        log.warning("a PostLocalSGDState is saved without its process groups")
        return {
            **self.state_dict(),
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        log.warning(
            "a loaded PostLocalSGDState works on the default process group and on the ranks of each machine; "
            "set process_group and subgroup otherwise"
        )
        start, inside = state["start_localSGD_iter"], state["post_local_gradient_allreduce"]
        self.__init__(None, None, start, inside)  # type: ignore[misc]
        self.load_state_dict(state)

    def reduce(self, bucket: dist.GradBucket, wires: Wires) -> torch.futures.Future[Tensor]:
        """Called by the hook; ``wires`` are the dtypes of wrappers around it, inner ones first."""
        strategy, local = self._strategy(wires), self._iter >= self.start_localSGD_iter
        if local and not self.post_local_gradient_allreduce:
            answer = completed_future(bucket.buffer())
        else:
            feed = self._feed(bucket.buffer().device, strategy, local)
            if feed.step.state in OVER and feed.step.next != self._iter:
                feed.step.go_to(self._iter)
            answer = feed.reduce(bucket, strategy)
        self.maybe_increase_iter(bucket)
        return answer

    def _strategy(self, wires: Wires) -> Strategy:
        """The same object in every step: lanes are found by it."""
        if wires not in self._strategies:
            strategy: Strategy = Mean()
            for dtype in wires:
                strategy = Cast(strategy, dtype)
            self._strategies[wires] = strategy
        return self._strategies[wires]

    def _feed(self, device: torch.device, strategy: Strategy, local: bool) -> DdpFeed:
        everyone = checked_group(self.process_group, "process_group of PostLocalSGDState")
        if not local:
            return self._opened(everyone, device, strategy).feed
        group = self.subgroup
        if group is None:
            if not is_alive(self._machine):
                board = self._opened(everyone, device, strategy).board
                self._machine = machine_group(everyone, board, device)
            group = self._machine
        return self._opened(checked_group(group, "subgroup of PostLocalSGDState"), device, strategy).feed

    def _opened(self, group: dist.ProcessGroup, device: torch.device, strategy: Strategy) -> OpenFeed:
        must_agree = {
            "hook": f"post_localSGD_hook of {describe(strategy)}",
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
            "subgroup": "the ranks of each machine" if self.subgroup is None else "a process group",
            "iter": self._iter,
        }
        return open_feed(group, device, strategy, must_agree)
