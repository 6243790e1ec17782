"""Models whose parameters are cut into shards: what FSDP and tensor parallelism make of them."""

from __future__ import annotations

import sys

from torch import nn

from ..errors import WrongType

MODULES = (("FullyShardedDataParallel", "wrapped by FSDP"), ("FSDPModule", "sharded by fully_shard (FSDP2)"))


def refuse_sharded(model: nn.Module, instead: str) -> None:
    """Strategies carry whole gradients of replicas; that of a shard is a sum already, of this rank's part."""
    what = _how_sharded(model)
    if what is not None:
        raise WrongType(
            f"this model is {what}: each rank has a part of every parameter, whose gradients are reduced and "
            f"scattered in backward already. gradlane carries whole gradients of replicas; {instead}"
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
    """A class, if anything can be of it: what nobody has imported nobody has used."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
