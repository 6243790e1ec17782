"""Ranks in nodes: a mean inside each node first, and any strategy across the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ..core.bucket import Bucket, as_layout
from ..core.parts import Parts, part_name, part_shape, parts_of
from ..core.scopes import ALONE, Scopes
from ..core.strategy import Reduced, Strategy, named_states
from ..core.subworld import in_scope, within
from ..core.world_change import Expected, OneField, Slots
from ..errors import InvalidValue, WrongType
from .checks import refuse_sparse
from .feedback import EF21, ErrorFeedback
from .mean import Mean
from .nesting import check_nesting
from .recut import Recut
from .weighted import WeightedMean


@dataclass
class Hierarchical(Strategy):
    """Reduce-scatter in the node, ``cross`` on this rank's part across the nodes, all-gather in the node.

    Each of the g ranks of a node has one part of every parameter, and carries it across. So a node sends what
    one rank would send without a hierarchy, and the memory of ``cross`` has 1/g of the gradient on each rank.
    To ``cross`` the ranks are nodes: a robust rule drops nodes, and each node's gradient is its mean.

    ``inner`` is the reduce-scatter: ``Mean()``, ``Cast(Mean(), bfloat16)`` or ``Sharded(codec)``. The
    all-gather sends the answer as it is, or as ``Cast`` narrows it.

    Nodes are the ranks with one host name, or ``ranks_per_node``; all have equally many ranks. With one rank
    per node ``cross`` works alone, with a single node ``inner`` does.
    """

    cross: Strategy
    inner: Strategy = field(default_factory=Mean)
    linear: ClassVar[bool] = True
    keeps_privacy: ClassVar[bool] = False
    uses_nodes: ClassVar[bool] = True
    _scopes: Scopes = field(init=False, repr=False, compare=False, default=ALONE)
    _slots: Slots = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, part in (("cross", self.cross), ("inner", self.inner)):
            if not isinstance(part, Strategy):
                raise WrongType(
                    f"Hierarchical {name}={type(part).__name__} is not a strategy; write "
                    "Hierarchical(ErrorFeedback(Sharded(Int4())))"
                )
        if not self.inner.scatters:
            raise InvalidValue(
                f"Hierarchical inner={type(self.inner).__name__} cannot reduce one part per rank; use "
                "Mean(), Cast(Mean(), bfloat16) or Sharded(codec), and put anything else in cross="
            )
        check_nesting(self)

    def refuses_inside(self, part: Strategy) -> str | None:
        if isinstance(part, Hierarchical):
            return "Hierarchical inside Hierarchical: there are two levels, nodes and ranks; use one"
        if part.uses_nodes or not part.alike:
            return (
                f"{type(part).__name__} inside Hierarchical would leave ranks with different gradients; use "
                "a strategy that all ranks take part in"
            )
        if isinstance(part, WeightedMean):
            return (
                "WeightedMean inside Hierarchical would weigh each part by another rank's weight; put it "
                "outside: WeightedMean(weight, Hierarchical(...))"
            )
        return None

    def refuses_around(self, wrapper: Strategy) -> str | None:
        if not isinstance(wrapper, ErrorFeedback | EF21):
            return None
        name = type(wrapper).__name__
        return (
            f"{name} outside of Hierarchical cannot know what was lost: it was lost of a sum over the node's "
            f"ranks. Put it inside: Hierarchical({name}(...))"
        )

    def enter(self, scopes: Scopes, slots: Slots) -> None:
        if "cross" not in scopes.sizes:
            raise InvalidValue(
                "Hierarchical needs nodes with equally many ranks, and these differ; start as many ranks on "
                "each host, give attach ranks_per_node=, or use the strategy without Hierarchical"
            )
        self._scopes, self._slots = scopes, slots
        self.cross.enter(scopes.within("cross"), self.slots_inside(slots))
        self.inner.enter(scopes.within("node"), slots)

    def slots_inside(self, slots: Slots) -> Slots:
        place, count = self._part()
        if count == 1:
            return slots
        return {
            part_name(name, place, count): Expected(part_shape(slot.shape, count), slot.dtype)
            for name, slot in slots.items()
        }

    def _part(self) -> tuple[int, int]:
        """Which part of each parameter this rank has, and of how many."""
        if self._scopes.sizes["cross"] == 1:
            return 0, 1
        return self._scopes.places["node"], self._scopes.sizes["node"]

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
        layout = parts.layout(bucket.place("node"))
        return await in_scope(self.inner.scatter(within(bucket, "node", cut, layout)), "node")

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """What each old node has is joined from its ranks' parts, and cut anew."""
        place, count = self._part()
        shared = [leaf.path for leaf in named_states(self.cross) if getattr(leaf.state, "shared", False)]
        nodes = Recut(OneField(saved, "cross"), self._slots, shared, place, count)
        number, now = self._scopes.places["cross"], self._scopes.sizes["cross"]
        if now == 1 and any(nodes):
            raise InvalidValue(
                "what Hierarchical keeps was saved by several nodes, and is for what they send each other; "
                "on one node it would never be sent. Go on with several nodes, or leave it out (strict=False)"
            )
        state = dict(nodes[number]) if now == len(nodes) else self.cross.carried(nodes, number, now)
        return {"cross": state} if state else {}
