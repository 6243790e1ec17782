"""Checks of a model and a group before gradients are reduced without DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import InvalidValue, WrongState, WrongType
from ..lane.one_rank import OneRank
from ..torch_internals import uncompiled
from .sharded_models import refuse_fsdp1, refuse_fsdp2

Parameters = dict[str, nn.Parameter]


def checked_model(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise WrongType(f"reduce_gradients needs a module, got {type(model).__name__}; pass the model")
    model = uncompiled(model)
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise WrongType(
            "this is a DDP model, and DDP reduces its gradients in backward already; use "
            "gradlane.attach(ddp, strategy), or train the module without DDP"
        )
    refuse_fsdp1(model)
    refuse_fsdp2(model, "use gradlane.attach(model, strategy), which takes part in that")
    return model


def checked_group(group: dist.ProcessGroup | OneRank | None) -> Any:
    if isinstance(group, OneRank):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise WrongState(
            "there is no process group; call torch.distributed.init_process_group first (torchrun sets what "
            "it needs), then reduce gradients"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise WrongType(
            f"group is a {type(group).__name__}, not a process group that this rank is in; pass what "
            "torch.distributed.new_group gave on a rank of it, or None"
        )
    return group


def trained_of(model: nn.Module) -> Parameters:
    """The parameters that get a gradient."""
    parameters = dict(model.named_parameters())
    if lazy := [name for name, parameter in parameters.items() if nn.parameter.is_lazy(parameter)]:
        raise WrongState(
            f"{lazy[0]} has no shape yet (a lazy module); run the model once before its gradients are reduced"
        )
    trained = {name: p for name, p in parameters.items() if p.requires_grad and p.numel()}
    if not trained:
        raise InvalidValue("the model has no parameter that needs a gradient; there is nothing to reduce")
    return trained


def one_device(trained: Parameters) -> torch.device:
    devices = {parameter.device for parameter in trained.values()}
    if len(devices) > 1:
        raise InvalidValue(
            f"the parameters are on {', '.join(sorted(map(str, devices)))}; call reduce_gradients for "
            "each part of the model that is on one device"
        )
    return devices.pop()


def sparse_names(model: nn.Module, trained: Parameters) -> list[str]:
    """The parameters with sparse gradients. The modules decide, as in DDP, so that all ranks agree."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    theirs = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    return [name for name, parameter in trained.items() if id(parameter) in theirs]
