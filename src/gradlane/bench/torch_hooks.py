"""torch's own communication hooks as arms: ``torch.fp16``, ``torch.powersgd(4)``, ..."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..core.collectives import Kind
from ..errors import InvalidValue
from .traffic import Traffic

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
_NAME = re.compile(r"torch\.(\w+)(?:\((\d+)\))?")


def torch_hook(name: str) -> tuple[str, int] | None:
    """The hook that an arm names, and its rank (for PowerSGD); None for other arms."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match[1] not in TORCH_HOOKS:
        known = ", ".join(f"torch.{hook}" for hook in TORCH_HOOKS)
        raise InvalidValue(f"arm {name!r} is not known; torch's hooks are {known}")
    return match[1], int(match[2] or 1)


def count_collectives(traffic: Traffic) -> None:
    """torch's hooks do not count: wrap the collectives of ``torch.distributed`` in this process."""
    for kind in ("all_reduce", "all_gather"):
        setattr(dist, kind, _counted(traffic, getattr(dist, kind), kind))


def _counted(traffic: Traffic, call: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    def counting(*args: Any, **options: Any) -> Any:
        payload = args[-1] if kind == "all_gather" else args[0]
        traffic.add(kind, payload.numel() * payload.element_size(), dist.get_world_size())
        return call(*args, **options)

    return counting


def register_hook(ddp: DistributedDataParallel, hook: str, rank: int) -> None:
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
