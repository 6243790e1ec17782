"""A group of one rank, which needs no network, no process group and no backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class OneRank:
    """The methods of a group that a lane calls, for a single rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: Sequence[Tensor], how: Any) -> OneRank:
        """Sum, minimum and maximum of one tensor are the tensor itself."""
        return self

    def allgather(self, received: Sequence[Sequence[Tensor]], sent: Sequence[Tensor]) -> OneRank:
        received[0][0].copy_(sent[0])
        return self

    def alltoall_base(self, received: Tensor, sent: Tensor, there: list[int], here: list[int]) -> OneRank:
        received.copy_(sent)
        return self

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, how: Any) -> OneRank:
        part.copy_(whole)
        return self

    def wait(self) -> None:
        """The group is also its own work, which is done at once."""
