"""The ranks of a job with tensor parallelism: more than those of a data-parallel group agree on a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidValue
from ..fsdp_internals import tensor_parallelism
from ..lane.mesh_ranks import Mesh, MeshRanks, mesh_ranks
from ..torch_internals import default_group


def pieces_of(parameters: Iterable[Tensor]) -> tuple[bool, ...]:
    """Of which parameters the other ranks have other pieces; of the rest they have copies."""
    found = map(tensor_parallelism, parameters)
    return tuple(how is not None and how.is_piece for how in found)


def tensor_parallel_ranks(parameters: Iterable[Tensor], group: Any) -> tuple[MeshRanks, Mesh] | None:
    """All ranks that must agree on a step, and their scopes; None without tensor parallelism.

    The ranks with other pieces of the model skip a step or fail with this one, so they are part of it.
    "cross" is the data-parallel ``group``.
    """
    found = [how for how in map(tensor_parallelism, parameters) if how is not None]
    if not found:
        return None
    if any(how.is_partial for how in found):
        raise InvalidValue(
            "a parameter is a DTensor with a partial placement: each rank has a summand of it; redistribute "
            "it to Replicate() or Shard(dim) first"
        )
    default, beside = default_group(), max(len(how.ranks) for how in found)
    if group.size() * beside != default.size():
        raise InvalidValue(
            f"a group of {group.size()} ranks, each beside {beside} for tensor parallelism, are not the "
            f"{default.size()} ranks of the job; pass the group of the data-parallel ranks, as "
            "mesh['dp'].get_group(), on a mesh of all ranks"
        )
    ranks = mesh_ranks(range(default.size()))
    members = {
        "world": range(default.size()),
        "node": [ranks.rank()],
        "cross": dist.get_process_group_ranks(group),
    }
    return ranks, Mesh(members, {"world": default, "cross": group})  # type: ignore[arg-type]
