"""An arm of a comparison: DDP alone, one of torch's hooks, or a strategy."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..core.collectives import Kind
from ..core.events import Event, wire_bytes
from ..core.strategy import Strategy
from ..ddp import attach
from ..errors import GradlaneError, InvalidValue
from ..session import Session
from ..session.local_training import LocalTraining
from ..strategies.text import describe, parse
from ..with_optimizer import attach_with_optimizer

DDP = "ddp"
COMPUTE = "Noop()"
TORCH_HOOKS = (
    "allreduce",
    "fp16",
    "bf16",
    "noop",
    "powersgd",
    "batched_powersgd",
    "quantize_pertensor",
    "quantize_perchannel",
)
_TORCH = re.compile(r"torch\.(\w+)(?:\((\d+)\))?")


class Arm:
    """An arm attached to a model. It counts the bytes sent, and keeps the events of a strategy."""

    def __init__(
        self, ddp: DistributedDataParallel, name: str, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """``optimizer``: of the training. Local steps count its steps, frozen moments are its own."""
        self.events: list[Event] = []
        self.sent_bytes = 0
        self.local: LocalTraining | None = None
        self._dense = 0  # bytes of a step of DDP itself
        if name == DDP:
            gradients = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
            self._dense = wire_bytes("all_reduce", gradients, dist.get_world_size())
        elif match := _TORCH.fullmatch(name):
            self._count_torch()
            _register(ddp, match[1], int(match[2] or 1))
        elif optimizer is None:
            self.attachment: Session = attach(ddp, parse(name), observer=self._on_event)
        else:
            self.attachment = attach_with_optimizer(ddp, optimizer, name, observer=self._on_event)
            self.local = self.attachment if isinstance(self.attachment, LocalTraining) else None

    def step_done(self) -> None:
        """After each step of the optimizer."""
        self.sent_bytes += self._dense
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

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self.sent_bytes += event.wire_bytes

    def _count_torch(self) -> None:
        """torch's hooks do not count: wrap the collectives of ``torch.distributed`` in this process."""
        for kind in ("all_reduce", "all_gather"):
            setattr(dist, kind, self._counted(getattr(dist, kind), kind))

    def _counted(self, call: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            payload = args[-1] if kind == "all_gather" else args[0]
            size = payload.numel() * payload.element_size()
            self.sent_bytes += wire_bytes(kind, size, dist.get_world_size())
            return call(*args, **options)

        return counting


def check_arm(name: str) -> Strategy | None:
    """Refuse the name of an arm that cannot be run; its strategy, if it has one."""
    if name == DDP:
        return None
    if match := _TORCH.fullmatch(name):
        if match[1] not in TORCH_HOOKS:
            known = ", ".join(f"torch.{hook}" for hook in TORCH_HOOKS)
            raise InvalidValue(f"arm {name!r} is not known; torch's hooks are {known}")
        return None
    try:
        return parse(name)
    except GradlaneError as error:
        raise InvalidValue(f"arm {name!r}: {error}; or use ddp, torch.fp16, ...") from None


def described(name: str) -> str | None:
    """An arm's strategy with all options written out, for records: defaults may change.

    None for DDP alone, for torch's hooks, and for a name that cannot be parsed."""
    try:
        return describe(parse(name))
    except InvalidValue:
        return None


def _register(ddp: DistributedDataParallel, hook: str, rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import (
        debugging_hooks,
        default_hooks,
        powerSGD_hook,
        quantization_hooks,
    )

    plain: dict[str, Callable[..., Any]] = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "noop": debugging_hooks.noop_hook,
    }
    if hook in plain:
        ddp.register_comm_hook(None, plain[hook])
    elif hook.startswith("quantize"):
        quantize = getattr(quantization_hooks, f"quantization_{hook.removeprefix('quantize_')}_hook")
        ddp.register_comm_hook(dist.group.WORLD, quantize)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )  # the first step it allows
        call = powerSGD_hook.powerSGD_hook if hook == "powersgd" else powerSGD_hook.batched_powerSGD_hook
        ddp.register_comm_hook(state, call)
