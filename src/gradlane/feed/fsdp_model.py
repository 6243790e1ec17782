"""What gradlane must know about a model that ``fully_shard`` or ``replicate`` has prepared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.collectives import Scope
from ..errors import InvalidValue, WrongState, WrongType
from ..fsdp_internals import (
    ShardedParameter,
    data_dimensions,
    is_replicated,
    local,
    param_groups,
    parameters_of_group,
    refuse_unknown,
    replicate_group,
    shard_group,
    shard_place,
)
from ..lane.mesh_ranks import Mesh, MeshRanks, mesh_ranks
from ..torch_internals import default_group, uncompiled


class FsdpModel:
    """The groups of parameters of a model, and the mesh that they are on. It keeps no model alive."""

    def __init__(self, model: nn.Module) -> None:
        groups = param_groups(model)
        if not groups:
            raise WrongType("this model has no parameter that FSDP could shard; attach to the model that has")
        self._groups = [weakref.ref(group) for group in groups]
        # ``fully_shard(torch.compile(module))`` has a group of its own, and names of the module inside.
        prefixes = {id(module): name for name, module in uncompiled(model).named_modules()}
        self.parameters: list[list[ShardedParameter]] = []
        """Of each group."""
        for group in groups:
            refuse_unknown(group)
            self.parameters.append(parameters_of_group(group, prefixes))
        first = groups[0]
        self._refuse_meta()
        self._refuse_other_meshes(groups)
        self.carries: Literal["replicas", "shards"] = "replicas" if is_replicated(first) else "shards"
        """What the strategy reduces: each rank's shard over the replicas, or the shards themselves."""
        self.place, self.count = shard_place(first)
        self.device: torch.device = first.device
        mesh = max((own.device_mesh for own in self.own().values()), key=lambda mesh: int(mesh.ndim))
        self.tensor_parallel = mesh.ndim > data_dimensions(first)
        self._ranks: Tensor = mesh.mesh
        self.alike = self._alike(first)
        """Which ranks have the same weights, as indices in ``ranks()``."""
        self.text = f"{mesh.mesh.tolist()} of {mesh.mesh_dim_names}, {self.carries}: {self._text(groups)}"
        """All that decides which buckets there are, and in which units, for the ranks to compare."""

    @property
    def groups(self) -> list[Any]:
        """Of FSDP: the parameters that one ``fully_shard`` call took."""
        return [found for group in self._groups if (found := group()) is not None]

    def weights(self) -> dict[str, Tensor]:
        """This rank's shard of each parameter."""
        return {name: local(own.detach()) for name, own in self.own().items()}

    def own(self) -> dict[str, Any]:
        """The ``DTensor`` of each parameter."""
        return {name: own for name, find in self.finders().items() if (own := find()) is not None}

    def finders(self) -> dict[str, Callable[[], Any]]:
        """What finds the ``DTensor`` of each parameter."""
        return {p.name: p.own for group in self.parameters for p in group}

    def ranks(self) -> tuple[Any, Mesh | None]:
        """The ranks that a step is agreed on with, and their scopes.

        "cross" has the replicas of this rank's shard, "node" the ranks with the other shards of its replica.
        A model without replicas has nodes by host name.
        """
        shards, replicas = shard_group(self.groups[0]), replicate_group(self.groups[0])
        if self.carries == "shards" and not self.tensor_parallel:
            return shards, None
        ranks = mesh_ranks(self._ranks.flatten().tolist())
        over: dict[Scope, Any] = {"node": shards, "cross": replicas}
        if self.carries == "shards":
            over = {"node": None, "cross": shards}
        members: dict[Scope, Sequence[int]] = {"world": range(ranks.size())}
        for scope, group in over.items():
            members[scope] = [ranks.rank()] if group is None else _indices(group, ranks)
        groups = {scope: group for scope, group in over.items() if group is not None}
        if ranks.size() == default_group().size():
            groups["world"] = default_group()
        return ranks, Mesh(members, groups)

    def _alike(self, first: Any) -> list[list[int]]:
        shape = self._ranks.shape
        indices = torch.arange(self._ranks.numel()).view(shape)
        if self.carries == "shards":
            return [[rank] for rank in indices.flatten().tolist()]
        dimension = int(first.mesh_info.replicate_mesh_dim)
        columns: list[list[int]] = indices.movedim(dimension, -1).reshape(-1, shape[dimension]).tolist()
        return columns

    def _text(self, groups: Sequence[Any]) -> str:
        return "; ".join(
            f"{[p.name for p in parameters]} by {group.gradient_divide_factor}"
            for group, parameters in zip(groups, self.parameters, strict=True)
        )

    def _refuse_meta(self) -> None:
        for name, own in self.own().items():
            if own.is_meta:
                raise WrongState(
                    f"{name} is on the meta device, so it has no value yet; load or initialise the model "
                    "first, then attach"
                )

    def _refuse_other_meshes(self, groups: Sequence[Any]) -> None:
        def ranks_of(group: Any) -> list[list[int]]:
            found = (replicate_group(group), shard_group(group))
            return [dist.get_process_group_ranks(each) for each in found if each is not None]

        for group, parameters in zip(groups, self.parameters, strict=True):
            if ranks_of(group) != ranks_of(groups[0]):
                raise InvalidValue(
                    f"{parameters[0].name} is on another mesh than {self.parameters[0][0].name}, and a "
                    "strategy works on one; shard all parts of the model on one mesh"
                )


def _indices(group: Any, ranks: MeshRanks) -> list[int]:
    return [ranks.ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
