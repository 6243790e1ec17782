"""An arm of a comparison: DDP alone, one of torch's hooks, or a strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..core.strategy import Strategy
from ..ddp import attach
from ..errors import GradlaneError, InvalidValue
from ..session import Session
from ..session.local_training import LocalTraining
from ..strategies.auto.strategy import Auto
from ..strategies.text import describe, parse
from ..with_optimizer import attach_with_optimizer
from .nodes import Nodes
from .stopwatch import Stopwatch
from .torch_hooks import count_collectives, register_hook, torch_hook
from .traffic import Traffic

DDP = "ddp"
COMPUTE = "Noop()"
HSDP = "hsdp"


class Arm(Traffic):
    """An arm attached to a model of DDP. It counts the bytes sent, and keeps the events of a strategy."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        name: str,
        optimizer: torch.optim.Optimizer | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """``optimizer``: of the training. Local steps count its steps, frozen moments are its own."""
        super().__init__(nodes)
        self.has_strategy = False  # which tells where the time of its requests went
        self.local: LocalTraining | None = None
        self._watch = Stopwatch()  # arms stop between their steps, and ``Auto`` must not count that
        self._dense = 0  # bytes of the gradients that DDP itself reduces
        self._sometimes_dense: Session | None = None  # ``Auto`` leaves some steps to DDP
        per_node = None if nodes is None else nodes.per_node
        if name == DDP:
            self._dense = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
        elif hook := torch_hook(name):
            count_collectives(self)
            register_hook(ddp, *hook)
        else:
            strategy = parse(name)
            if isinstance(strategy, Auto):
                strategy.use_clock(self._watch)
            attached = (
                attach(ddp, strategy, observer=self.on_event, ranks_per_node=per_node)
                if optimizer is None
                else attach_with_optimizer(
                    ddp, optimizer, strategy, observer=self.on_event, ranks_per_node=per_node
                )
            )
            self.attachment: Session = attached
            self.has_strategy = True
            self.local = attached if isinstance(attached, LocalTraining) else None
            self._sometimes_dense = attached if isinstance(strategy, Auto) else None

    def step_begins(self) -> None:
        """Before each step."""
        self._watch.start()

    def step_done(self) -> None:
        """After each step of the optimizer."""
        self._watch.stop()
        if self._dense:
            self.add("all_reduce", self._dense, dist.get_world_size())
        if self._sometimes_dense is not None:
            self.sent_bytes = int(self._sometimes_dense.metrics()["comm/bytes_wire"])
        if self.local is not None:
            figures = self.local.metrics()  # the warm-up's bytes are in no event
            self.sent_bytes = round(figures["local/bytes_per_step"] * figures["local/steps"])

    def finish(self) -> None:
        """After the last step: local steps end with a round."""
        if self.local is not None:
            self.local.finish()

    def agreed(self) -> AbstractContextManager[None]:
        """For evaluation: the weights that all ranks have agreed on."""
        return nullcontext() if self.local is None else self.local.agreed()


def is_hsdp(name: str) -> bool:
    return name == HSDP or name.startswith(f"{HSDP}:")


def strategy_text(name: str) -> str:
    """Of an arm that has a strategy: ``hsdp: Mean()`` has Mean()."""
    return name.removeprefix(f"{HSDP}:").strip()


def check_arm(name: str) -> Strategy | None:
    """Refuse the name of an arm that cannot be run; its strategy, if it has one."""
    if name in (DDP, HSDP) or torch_hook(name):
        return None
    try:
        return parse(strategy_text(name))
    except GradlaneError as error:
        raise InvalidValue(f"arm {name!r}: {error}; or use ddp, torch.fp16, ...") from None


def described(name: str) -> str | None:
    """An arm's strategy with all options written out, for records: defaults may change.

    None for DDP and HSDP alone, for torch's hooks, and for a name that cannot be parsed."""
    try:
        return describe(parse(strategy_text(name)))
    except InvalidValue:
        return None
