"""Which ranks share a node, and the process groups of a node and across nodes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..core.collectives import Scope
from ..core.numbers import is_whole
from ..core.scopes import Scopes
from ..errors import InvalidValue
from ..torch_internals import default_group


def nodes_of(hosts: list[str], ranks_per_node: int | None) -> list[list[int]]:
    """The ranks of each node: those with one host name, or successive ones."""
    world = len(hosts)
    if ranks_per_node is not None:
        if not is_whole(ranks_per_node) or ranks_per_node < 1 or world % ranks_per_node:
            raise InvalidValue(
                f"ranks_per_node={ranks_per_node!r} does not divide the {world} ranks; use a number that does"
            )
        return [list(range(start, start + ranks_per_node)) for start in range(0, world, ranks_per_node)]
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())


def scope_groups(group: Any, nodes: list[list[int]], scopes: Scopes, seconds: float) -> dict[Scope, Any]:
    """The process group of each scope, for a backend whose collectives run on the device. Collective.

    They are made here, once, and in one order on all ranks. Made later, inside of a hook, they could wait for
    a rank that waits elsewhere.
    """
    across = [list(ranks) for ranks in zip(*nodes, strict=True)]
    return {
        "world": group,
        "node": _subgroup(group, nodes, scopes.places["cross"], seconds),
        "cross": _subgroup(group, across, scopes.places["node"], seconds),
    }


def _subgroup(group: Any, divided: list[list[int]], mine: int, seconds: float) -> Any:
    """The group of this rank in a group that is divided; the group itself if it is not."""
    if len(divided) == 1:
        return group
    limit = timedelta(seconds=seconds)
    if default_group().bound_device_id is not None:  # then new_group would wait for all ranks of the job
        return dist.split_group(group, divided, timeout=limit)
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group([ranks[rank] for rank in divided[mine]], limit, use_local_synchronization=True)
