"""Refuses models whose parameters are sharded by FSDP or tensor parallelism."""

from __future__ import annotations

import sys

from torch import nn

from ..errors import WrongType

MODULES = (("FullyShardedDataParallel", "wrapped by FSDP"), ("FSDPModule", "sharded by fully_shard (FSDP2)"))


def refuse_sharded(model: nn.Module, instead: str) -> None:
    """Strategies reduce gradients of replicas; the gradient of a shard is reduced already."""
    if (what := _how_sharded(model)) is not None:
        raise WrongType(
            f"this model is {what}: each rank has a part of every parameter, and backward reduces and "
            f"scatters its gradient already. gradlane reduces the gradients of full copies; {instead}"
        )


def _how_sharded(model: nn.Module) -> str | None:
    for name, what in MODULES:
        kind = _loaded("torch.distributed.fsdp", name)
        if kind is not None and any(isinstance(part, kind) for part in model.modules()):
            return what
    kind = _loaded("torch.distributed.tensor", "DTensor")
    if kind is not None and any(isinstance(parameter, kind) for parameter in model.parameters()):
        return "made of DTensors (tensor parallelism)"
    return None


def _loaded(module: str, name: str) -> type | None:
    """A class of a module that was imported; if it was not, no object can be of the class."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
