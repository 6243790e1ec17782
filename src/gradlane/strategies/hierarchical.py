"""Ranks in nodes: a mean inside each node first, and any strategy across the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.bucket import Bucket, as_layout
from ..core.parts import Parts, part_shape, parts_of
from ..core.scopes import Scopes
from ..core.strategy import Reduced, Strategy
from ..core.subworld import in_scope, within
from ..core.world_change import Slots
from ..errors import InvalidValue, WrongType
from .checks import refuse_sparse
from .mean import Mean
from .on_parts import OnParts


@dataclass
class Hierarchical(OnParts):
    """Reduce-scatter in the node, ``cross`` on this rank's part across the nodes, all-gather in the node.

    Each of the g ranks of a node has one part of every parameter, and carries it across. So a node sends what
    one rank would send without a hierarchy, and the memory of ``cross`` has 1/g of the gradient on each rank.
    To ``cross`` the ranks are nodes: a robust rule drops nodes, and each node's gradient is its mean.

    ``inner`` is the reduce-scatter: ``Mean()``, ``Cast(Mean(), bfloat16)`` or ``Sharded(codec)``. The
    all-gather sends the answer as it is, or as ``Cast`` narrows it.

    Nodes are the ranks with one host name, or ``ranks_per_node``; all have equally many ranks. With one rank
    per node ``cross`` works alone, with a single node ``inner`` does.
    """

    inner: Strategy = field(default_factory=Mean)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Strategy):
            raise WrongType(
                f"Hierarchical inner={type(self.inner).__name__} is not a strategy; write "
                "Hierarchical(ErrorFeedback(Sharded(Int4())), inner=Mean())"
            )
        if not self.inner.scatters:
            raise InvalidValue(
                f"Hierarchical inner={type(self.inner).__name__} cannot reduce one part per rank; use "
                "Mean(), Cast(Mean(), bfloat16) or Sharded(codec), and put anything else in cross="
            )
        super().__post_init__()

    @staticmethod
    def part_shape(shape: torch.Size, count: int) -> torch.Size:
        return part_shape(shape, count)

    def enter(self, scopes: Scopes, slots: Slots) -> None:
        if "cross" not in scopes.sizes:
            raise InvalidValue(
                "Hierarchical needs nodes with equally many ranks, and these differ; start as many ranks on "
                "each host, give attach ranks_per_node=, or use the strategy without Hierarchical"
            )
        super().enter(scopes, slots)
        self.inner.enter(scopes.within("node"), slots)

    def _part(self) -> tuple[int, int]:
        """With a single node ``inner`` works alone, on whole parameters."""
        return (0, 1) if self._scopes.sizes["cross"] == 1 else super()._part()

    def carried_across(self, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self._scopes.sizes["cross"] == 1 and any(nodes):
            raise InvalidValue(
                "what Hierarchical keeps was saved by several nodes, and is for what they send each other; "
                "on one node it would never be sent. Go on with several nodes, or leave it out (strict=False)"
            )
        return super().carried_across(nodes)

    async def reduce(self, bucket: Bucket) -> Reduced:
        refuse_sparse(bucket, "Hierarchical")
        place, count = bucket.place("node"), bucket.sizes.get("node", 1)
        if bucket.sizes.get("cross", 1) == 1:
            return await self.inner.reduce(bucket)
        if count == 1:
            return await self.cross.reduce(bucket)
        parts = parts_of(as_layout(bucket.layout), count)
        part = await self._node_mean(bucket, parts)
        across = within(bucket, "cross", part, parts.layout(place))
        reduced = await in_scope(self.cross.reduce(across), "cross")
        own = within(bucket, "node", reduced.mean, parts.layout(place))
        flat = parts.join(await in_scope(self.inner.gather(own), "node"), into=bucket.flat)
        if (active := bucket.divisor()) != bucket.world:  # join(divide_by_initial_world_size=False)
            flat.mul_(bucket.world / active)
        return Reduced(flat, bounded=reduced.bounded and type(self.inner) is Mean)

    async def _node_mean(self, bucket: Bucket, parts: Parts) -> Tensor:
        """This rank's part of the mean over its node."""
        cut = parts.cut(bucket.flat, bucket.empty("parts", parts.count * parts.numel))
        # The layout is the whole one: seeds follow from it, and the ranks of a node must have the same.
        given = within(bucket, "node", cut, as_layout(bucket.layout))
        return await in_scope(self.inner.scatter(given), "node")

    @property
    def scatters(self) -> bool:
        return self.cross.scatters

    async def scatter(self, bucket: Bucket) -> Tensor:
        """In two hops: inside the node the parts for this rank's place in each node, then across the nodes
        this rank's own. A node sends what one rank would send without a hierarchy."""
        nodes, ranks = bucket.sizes.get("cross", 1), bucket.sizes.get("node", 1)
        if nodes == 1:
            return await self.inner.scatter(bucket)
        if ranks == 1:
            return await self.cross.scatter(bucket)
        if bucket.rank != bucket.place("cross") * ranks + bucket.place("node"):
            raise InvalidValue(
                f"rank {bucket.rank} is number {bucket.place('node')} of node {bucket.place('cross')}, and a "
                "reduce-scatter in two hops needs the ranks of a node to follow each other; start them so, "
                "or use the strategy without Hierarchical"
            )
        layout, numel = as_layout(bucket.layout), bucket.flat.numel()
        by_place = bucket.empty("by place", numel).view(ranks, nodes, -1)
        by_place.copy_(bucket.flat.view(nodes, ranks, -1).transpose(0, 1))
        given = within(bucket, "node", by_place.view(-1), layout)
        part = await in_scope(self.inner.scatter(given), "node")
        return await in_scope(self.cross.scatter(within(bucket, "cross", part, layout)), "cross")
