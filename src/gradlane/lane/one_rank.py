"""A group of one rank, which needs no network, no process group and no backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class OneRank:
    """What a lane asks of a group, answered for a rank that is all ranks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: Sequence[Tensor], how: Any) -> OneRank:
        """The sum, the least and the largest of one are itself."""
        return self

    def allgather(self, received: Sequence[Sequence[Tensor]], sent: Sequence[Tensor]) -> OneRank:
        received[0][0].copy_(sent[0])
        return self

    def alltoall_base(self, received: Tensor, sent: Tensor, there: list[int], here: list[int]) -> OneRank:
        received.copy_(sent)
        return self

    def wait(self) -> None:
        """It is its own work, too, and done at once."""
