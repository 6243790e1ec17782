"""Do the ranks still hold the same weights? A hash now and then finds out, and names who differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..core.bucket import Bucket, Slot
from ..core.collectives import all_reduce
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, RanksDisagree
from ..lane.base import Lane

STATE = "what the strategy remembers"
NO_VOTE = 0
"""Of a rank that has joined: it trains no more, and gets the others' weights at the end of ``join``."""


def checked_every(every: int | None) -> int | None:
    if every is None or (isinstance(every, int) and not isinstance(every, bool) and every > 0):
        return every
    raise InvalidValue(f"verify_every={every!r} is not possible; use a number of steps from 1 up, or None")


@dataclass
class _Table(Strategy):
    """Each rank fills in its own row, and all get the whole."""

    async def reduce(self, bucket: Bucket) -> Reduced:
        return Reduced(await all_reduce(bucket.flat, op="sum", exact=True))


@dataclass
class DriftCheck:
    """Compares what must be the same on all ranks, every ``every`` steps.

    One hash of all goes round, 8 bytes for each rank; only where they differ one for each parameter.
    """

    every: int
    lane: Lane
    rank: int
    world: int
    weights: Callable[[], Mapping[str, Tensor]]
    state: Callable[[], Mapping[Any, Any]]
    """What the strategy keeps alike on all ranks."""

    def due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def trouble(self, step: int, *, joined: bool = False) -> BaseException | None:
        """What to raise, on all ranks: who differs from the others, and in what."""
        weights = self.weights()
        device = next(iter(weights.values())).device
        hashes = dict.fromkeys([*weights, STATE], NO_VOTE)
        if not joined:
            hashes = {name: hashed(tensor) for name, tensor in weights.items()}
            hashes[STATE] = hashed(self.state())
        told = self._told([NO_VOTE if joined else hashed(repr(hashes))], step, device)
        if isinstance(told, BaseException):
            return told
        if not odd_ones(whole for (whole,) in told):
            return None
        told = self._told(list(hashes.values()), step, device)
        if isinstance(told, BaseException):
            return told
        odd = {name: odd_ones(column) for name, column in zip(hashes, zip(*told, strict=True), strict=True)}
        where = [name for name, ranks in odd.items() if ranks]
        who = sorted({rank for name in where for rank in odd[name]})
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        return RanksDisagree(
            f"step {step}: rank {', '.join(map(str, who))} of {self.world} has drifted from the others in "
            f"{where[0]}{more}; load one checkpoint on all ranks, and look for code that changes weights, or "
            "draws random numbers, on some ranks only"
        )

    def _told(self, mine: list[int], step: int, device: torch.device) -> list[list[int]] | BaseException:
        table = torch.zeros(self.world, len(mine), dtype=torch.int64)
        table[self.rank] = torch.tensor(mine)
        bucket = Bucket(
            flat=table.view(-1).to(device), layout=(Slot("hashes", table.shape),), step=step, rank=self.rank,
            world=self.world,
        )  # fmt: skip
        answer = self.lane.submit(_Table(), bucket)
        self.lane.drain()
        failure = self.lane.take_failure()
        return failure or answer.value().view(self.world, -1).tolist()


def odd_ones(told: Iterable[int]) -> list[int]:
    """The ranks that are not with the majority of those that vote; of two, the second."""
    votes = {rank: own for rank, own in enumerate(told) if own != NO_VOTE}
    usual = Counter(votes.values()).most_common(1)[0][0] if votes else NO_VOTE
    return [rank for rank, own in votes.items() if own != usual]


def hashed(content: object) -> int:
    """Of the bits of tensors, and the text of all else; inside of mappings too."""
    digest = sha256()  # processors have instructions for it: a quarter of the time of blake2b
    if isinstance(content, Tensor):
        digest.update(content.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    elif isinstance(content, Mapping):
        for name in sorted(content):
            digest.update(f"{name} {hashed(content[name])}".encode())
    else:
        digest.update(repr(content).encode())
    return int.from_bytes(digest.digest()[:8], "little", signed=True) or 1  # 0 is no vote
