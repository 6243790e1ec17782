"""The replicas of a model that FSDP shards: any strategy across them, on each rank's shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.bucket import Bucket, as_layout
from ..core.parts import rows_shape
from ..core.strategy import Reduced, Strategy
from ..core.subworld import in_scope, within
from .mean import Noop
from .on_parts import OnParts


@dataclass
class AcrossReplicas(OnParts):
    """``cross`` on this rank's shard, across the replicas of HSDP or ``replicate()``. ``attach`` makes it of
    the strategy that it gets.

    It is the middle of ``Hierarchical``: FSDP's own reduce-scatter has the node's mean already, and its own
    all-gather distributes the new weights. Buckets hold shards, by rows and padded with zeros.
    """

    _weights: ClassVar[str] = "divide the loss by the weights yourself, or use DistributedDataParallel"

    @staticmethod
    def part_shape(shape: torch.Size, count: int) -> torch.Size:
        return rows_shape(shape, count)

    def refuses_inside(self, part: Strategy) -> str | None:
        """``Noop`` is for measuring, as it is on DDP."""
        return None if isinstance(part, Noop) else super().refuses_inside(part)

    async def reduce(self, bucket: Bucket) -> Reduced:
        across = within(bucket, "cross", bucket.flat, as_layout(bucket.layout))
        reduced = await in_scope(self.cross.reduce(across), "cross")
        return Reduced(reduced.mean, bounded=reduced.bounded)
