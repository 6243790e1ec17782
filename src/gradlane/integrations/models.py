"""The models that gradlane works on in a framework: those of DDP, and those of FSDP2."""

from __future__ import annotations

import os

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..errors import WrongType
from ..fsdp_internals import param_groups
from ..log import log


def is_fsdp2(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has prepared the model, or a part of it."""
    return bool(param_groups(model))


def refuse_fsdp1(model: nn.Module, instead: str) -> None:
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise WrongType(fsdp1(instead))


def fsdp1(instead: str) -> str:
    return (
        "this model is wrapped by FullyShardedDataParallel (FSDP1), and has no place for a strategy; "
        f"gradlane works with FSDP2: {instead}"
    )


def warn_of_ignored_plugin(model: nn.Module) -> None:
    """Accelerate drops ``fsdp_plugin`` silently where the devices are CPUs."""
    if isinstance(model, DistributedDataParallel) and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        log.warning(
            "Accelerate uses its FSDP plugin on GPUs and the like only, and has made a DDP model here: the "
            "strategy works on full copies"
        )


def needs_another(who: str, strategy: str) -> str:
    """The error message for a Lightning Trainer or Fabric with another strategy."""
    if strategy == "FSDPStrategy":
        return fsdp1(f"{who}(strategy=ModelParallelStrategy(...)) and fully_shard")
    return (
        f"gradlane works on models of DDP and FSDP2, the strategy of this {who} is {strategy}; use "
        f'{who}(strategy="ddp"), or ModelParallelStrategy with fully_shard'
    )
