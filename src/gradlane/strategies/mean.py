"""The simplest strategies: the mean of all ranks, that of a node, and no communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import all_reduce, reduce_scatter
from ..core.strategy import Reduced, Strategy


@dataclass
class Mean(Strategy):
    """The mean over all ranks by one all-reduce per bucket: what DDP does without a hook."""

    linear: ClassVar[bool] = True

    @property
    def averages(self) -> bool:
        return True

    @property
    def scatters(self) -> bool:
        return True

    async def reduce(self, bucket: Bucket) -> Reduced:
        return Reduced(await all_reduce(bucket.flat))

    async def scatter(self, bucket: Bucket) -> Tensor:
        return await reduce_scatter(bucket.flat)


@dataclass
class NodeMean(Strategy):
    """The mean over the ranks of this rank's node. Nodes differ, so something else must bring them together:
    ``local_steps(..., inside=NodeMean())``."""

    alike: ClassVar[bool] = False
    uses_nodes: ClassVar[bool] = True

    async def reduce(self, bucket: Bucket) -> Reduced:
        return Reduced(await all_reduce(bucket.flat, over="node"))


@dataclass
class Noop(Strategy):
    """No communication: every rank keeps its own gradient, so replicas drift apart.

    For measuring compute alone, or where something else (a local-SGD outer loop) synchronises.
    """

    alike: ClassVar[bool] = False

    @property
    def scatters(self) -> bool:
        return True

    async def reduce(self, bucket: Bucket) -> Reduced:
        return Reduced(bucket.flat)

    async def scatter(self, bucket: Bucket) -> Tensor:
        return bucket.flat.view(bucket.world, -1)[bucket.rank].clone()
