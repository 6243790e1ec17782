"""Refuses models whose parameters are sharded, where a strategy would need a full copy on each rank."""

from __future__ import annotations

import sys

from torch import nn

from ..errors import WrongType
from ..fsdp_internals import fsdp_class


def refuse_fsdp1(model: nn.Module) -> None:
    """The older FSDP has no place where a strategy could take over."""
    kind = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if kind is not None and any(isinstance(part, kind) for part in model.modules()):
        raise WrongType(
            "this model is wrapped by FSDP (FullyShardedDataParallel), which lets nobody else reduce its "
            "gradients; shard it by fully_shard (FSDP2) instead, and attach to that"
        )


def refuse_fsdp2(model: nn.Module, instead: str) -> None:
    kind = fsdp_class()
    if kind is not None and any(isinstance(part, kind) for part in model.modules()):
        raise WrongType(
            "this model is sharded by fully_shard (FSDP2): backward reduces and scatters its gradients, and "
            f"each rank has a part of every parameter; {instead}"
        )


def refuse_dtensors(model: nn.Module, instead: str) -> None:
    kind = _loaded("torch.distributed.tensor", "DTensor")
    if kind is not None and any(isinstance(parameter, kind) for parameter in model.parameters()):
        raise WrongType(f"this model is made of DTensors (tensor parallelism); {instead}")


def _loaded(module: str, name: str) -> type | None:
    """A class of a module that was imported; if it was not, no object can be of the class."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
