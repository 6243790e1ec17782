"""Every name of FSDP2 that torch keeps to itself, each behind one small function.

As torch_internals.py, for ``fully_shard`` and ``replicate``. The tests run with torch 2.13.
``refuse_unknown`` compares the names with those of the torch that is installed.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import WrongState

Undo = Callable[[], None]


def fsdp_class() -> type | None:
    """``FSDPModule``; None where nobody has imported it, so that no model can be one."""
    found = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return found if isinstance(found, type) else None


def param_groups(model: nn.Module) -> list[Any]:
    """The parameters of each ``fully_shard`` or ``replicate`` call, which travel together.

    ``FSDPModule._get_fsdp_state``, ``FSDPState._fsdp_param_groups``; before 2.12 ``_fsdp_param_group``.
    """
    found: dict[int, Any] = {}
    kind = fsdp_class()
    modules: list[Any] = [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [group for group in (state._fsdp_param_group,) if group is not None]
        found.update({id(group): group for group in groups})
    return list(found.values())


NEEDED = (
    "fsdp_params",
    "mesh_info",
    "post_backward",
    "_reduce_scatter_comm",
    "_all_gather_comm",
    "mp_policy",
    "is_sharded",
)


def refuse_unknown(group: Any) -> None:
    """Refuse a version of torch whose FSDP2 is another one."""
    missing = [name for name in NEEDED if not hasattr(group, name)]
    info = group.mesh_info
    if (
        not missing
        and is_replicated(group)
        and group._all_reduce_process_group is not info.replicate_process_group
    ):
        missing = ["mesh_info.replicate_process_group"]
    if missing:
        raise WrongState(
            f"FSDP2 of torch {torch.__version__} is another one than gradlane knows (no {missing[0]}); use "
            "torch 2.13, or DistributedDataParallel"
        )


# Meshes


def is_replicated(group: Any) -> bool:
    """Whether the mesh has replicas: HSDP and ``replicate``."""
    return getattr(group.mesh_info, "replicate_process_group", None) is not None


def is_sharded(group: Any) -> bool:
    """Whether the mesh has shards: FSDP2 and HSDP."""
    return getattr(group.mesh_info, "shard_process_group", None) is not None


def replicate_group(group: Any) -> Any:
    return group.mesh_info.replicate_process_group if is_replicated(group) else None


def shard_group(group: Any) -> Any:
    return group.mesh_info.shard_process_group if is_sharded(group) else None


def shard_place(group: Any) -> tuple[int, int]:
    """Which part of each parameter this rank has, and of how many."""
    info = group.mesh_info
    return (info.shard_mesh_rank, info.shard_mesh_size) if is_sharded(group) else (0, 1)


def data_dimensions(group: Any) -> int:
    """The dimensions of the mesh over which data is parallel."""
    return int(group.mesh_info.mesh.ndim)


# Parameters


class ShardedParameter(NamedTuple):
    """A parameter of a group, as FSDP cuts it along its first dimension."""

    name: str
    shape: torch.Size
    """Before it is cut. One that is cut along another dimension has its pieces side by side here."""
    part: torch.Size
    """This rank's, padded as in the flat gradient."""
    dtype: torch.dtype
    """Of the flat gradient."""
    own: Callable[[], Any]
    """The ``DTensor`` that the optimizer has; None if the model is gone. A weak reference to it would keep
    ``module.to`` from working: torch swaps tensors there, and those with weak references it does not."""
    trained: bool
    is_piece: bool
    """Whether ranks of other dimensions of the mesh have other pieces of it, and not copies."""


def parameters_of_group(group: Any, prefixes: dict[int, str]) -> list[ShardedParameter]:
    """``prefixes``: the name of each module by its id. ``FSDPParam._module_info`` and ``_orig_size``."""
    return [_parameter(group, each, prefixes) for each in group.fsdp_params]


def _parameter(group: Any, parameter: Any, prefixes: dict[int, str]) -> ShardedParameter:
    info, find = parameter._module_info, _finder(group, parameter)
    own = find()
    prefix = prefixes.get(id(info.module), "")
    whole, dimension = parameter._orig_size, parameter.fsdp_placement.dim
    part = parameter.padded_sharded_param_size
    if dimension:
        whole = torch.Size([part[0] * shard_place(group)[1], *part[1:]])
    policy = group.mp_policy
    others = own.placements[data_dimensions(group) :]
    return ShardedParameter(
        f"{prefix}.{info.param_name}" if prefix else info.param_name,
        whole,
        part,
        policy.reduce_dtype or policy.param_dtype or own.dtype,
        find,
        own.requires_grad,
        any(placement.is_shard() for placement in others),
    )


def _finder(group: Any, parameter: Any) -> Callable[[], Any]:
    groups, parameters = weakref.ref(group), weakref.ref(parameter)

    def own() -> Any:
        group, parameter = groups(), parameters()
        if group is None or parameter is None:
            return None
        if not group.is_sharded:
            return parameter.sharded_param
        # Until its first forward FSDP may hold another one: of the meta device, if the model is loaded later.
        return getattr(parameter._module_info.module, parameter._module_info.param_name)

    return own


def with_gradient(group: Any) -> list[int]:
    """Indices of the parameters whose gradients FSDP is about to reduce; in a hook before ``post_backward``.

    The parameters have gradients of this backward, or of earlier ones without synchronisation.
    ``FSDPParam._unsharded_param``.
    """
    unused_too = getattr(group, "reduce_scatter_unused_params", False)
    return [
        index
        for index, parameter in enumerate(group.fsdp_params)
        if hasattr(parameter, "_unsharded_param")
        and (
            parameter.unsharded_accumulated_grad is not None
            or parameter.unsharded_param.grad is not None
            or (unused_too and parameter.unsharded_param.requires_grad)
        )
    ]


def fills_late(group: Any, indices: list[int], dtype: torch.dtype) -> bool:
    """Whether the gradients will be views of what FSDP reduces, and nobody reads them before backward ends:
    then it may be filled later. FSDP would otherwise cast, add or move it at once.

    ``Tensor._post_accumulate_grad_hooks``.
    """
    for index in indices:
        parameter = group.fsdp_params[index]
        own = parameter.sharded_param
        if own.grad is not None or own.dtype != dtype or parameter.offload_to_cpu:
            return False
        if getattr(own, "_post_accumulate_grad_hooks", None):
            return False
    return True


def reduces(group: Any) -> bool:
    """Whether backward reduces gradients: ``set_requires_gradient_sync``."""
    return bool(group.reduce_grads)


# Tensor parallelism


class TensorParallelism(NamedTuple):
    """How the ranks that a parameter is distributed over have it."""

    ranks: tuple[int, ...]
    is_piece: bool
    """Whether each rank has a piece of it. Otherwise all have copies."""
    is_partial: bool
    """Whether each rank has a summand."""


def tensor_parallelism(parameter: Tensor) -> TensorParallelism | None:
    """Of a ``DTensor``, or of a local tensor that DDP has made of one; None for any other parameter.

    ``Parameter._st_info``: torch's transformation for DDP.
    """
    info: Any = getattr(parameter, "_st_info", None)
    placements = getattr(info or parameter, "placements", None)
    if placements is None:
        return None
    mesh = info.mesh if info is not None else parameter.device_mesh  # type: ignore[attr-defined]
    return TensorParallelism(
        tuple(mesh.mesh.flatten().tolist()),
        any(placement.is_shard() for placement in placements),
        any(placement.is_partial() for placement in placements),
    )


# Places where gradlane takes over. Each call returns what puts back the old state.


def replace_replicate_group(group: Any, carrier: Any) -> Undo:
    """Let ``carrier.allreduce`` have what FSDP would all-reduce over replicas.

    ``mesh_info`` is one object for many groups, so this group gets a copy.
    """
    info = copy.copy(group.mesh_info)
    info.replicate_process_group = carrier
    return _replaced(group, "mesh_info", info)


def replace_reduce_scatter(group: Any, comm: Callable[[Any], Any]) -> Undo:
    """``comm`` makes another one of the old one. ``FSDPParamGroup._reduce_scatter_comm``."""
    return _replaced(group, "_reduce_scatter_comm", comm(group._reduce_scatter_comm))


def replace_all_gather(group: Any, comm: Callable[[Any], Any]) -> Undo:
    """The same. ``FSDPParamGroup._all_gather_comm``."""
    return _replaced(group, "_all_gather_comm", comm(group._all_gather_comm))


def before_post_backward(group: Any, callback: Callable[[], None]) -> Undo:
    """Call ``callback`` before FSDP reduces the gradients of this group in a backward."""
    found = weakref.ref(group)

    def post_backward(*unused: Any) -> Any:
        own: Any = found()
        callback()
        return type(own).post_backward(own, *unused)

    vars(group)["post_backward"] = post_backward

    def undo() -> None:
        if (own := found()) is not None:
            vars(own).pop("post_backward", None)

    return undo


def _replaced(group: Any, name: str, value: Any) -> Undo:
    found, before = weakref.ref(group), getattr(group, name)
    setattr(group, name, value)

    def undo() -> None:
        if (own := found()) is not None:
            setattr(own, name, before)

    return undo


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a ``DTensor``, without communication; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
