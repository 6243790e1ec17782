"""Compares a hash of the weights over all ranks every few steps, and names the ranks that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..core.bucket import Bucket, Slot
from ..core.collectives import all_reduce
from ..core.strategy import Reduced, Strategy
from ..core.streams import has_streams
from ..errors import InvalidValue, RanksDisagree
from ..lane.base import Lane
from .device_hash import device_hash

STATE = "what the strategy remembers"
NO_VOTE = 0
"""Of a rank that has joined: it no longer trains, and gets the others' weights at the end of ``join``."""


def checked_every(every: int | None) -> int | None:
    if every is None or (isinstance(every, int) and not isinstance(every, bool) and every > 0):
        return every
    raise InvalidValue(f"verify_every={every!r} is not possible; use a number of steps from 1 up, or None")


@dataclass
class _Table(Strategy):
    """Each rank fills in its own row, and all ranks get all rows."""

    async def reduce(self, bucket: Bucket) -> Reduced:
        return Reduced(await all_reduce(bucket.flat, op="sum", exact=True))


@dataclass
class DriftCheck:
    """Compares what must be the same on all ranks, every ``every`` steps.

    The ranks first exchange one hash, 8 bytes per rank; if those differ, one hash per parameter.
    """

    every: int
    lane: Lane
    rank: int
    world: int
    weights: Callable[[], Mapping[str, Tensor]]
    state: Callable[[], Mapping[Any, Any]]
    """What the strategy keeps identical on all ranks."""
    alike: Sequence[Sequence[int]] = ()
    """Which ranks have the same weights; all of them if this is empty."""

    def due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def error_of(self, step: int, *, joined: bool = False) -> BaseException | None:
        """The error to raise on all ranks: which ranks differ from the others, and in what."""
        found = self.differing(step, joined=joined)
        if not isinstance(found, tuple):
            return found
        who, what = found
        return RanksDisagree(
            f"step {step}: rank {who} of {self.world} has drifted from the others in {what}; load one "
            "checkpoint on all ranks, and look for code that changes weights, or draws random numbers, on "
            "some ranks only"
        )

    def differing(self, step: int, *, joined: bool = False) -> tuple[str, str] | BaseException | None:
        """The ranks that differ from the others, and in what; or the error of the lane. Collective."""
        weights = self.weights()
        device = next(iter(weights.values())).device
        hashes = dict.fromkeys([*weights, STATE], NO_VOTE)
        if not joined:
            hashes = hashes_of(weights)
            hashes[STATE] = hashed(self.state())
        table = self._gathered([NO_VOTE if joined else hashed(repr(hashes))], step, device)
        if isinstance(table, BaseException):
            return table
        if not self._drifted([total for (total,) in table]):
            return None
        table = self._gathered(list(hashes.values()), step, device)
        if isinstance(table, BaseException):
            return table
        differing = {
            name: self._drifted(column) for name, column in zip(hashes, zip(*table, strict=True), strict=True)
        }
        names = [name for name, ranks in differing.items() if ranks]
        ranks = sorted({rank for name in names for rank in differing[name]})
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return ", ".join(map(str, ranks)), f"{names[0]}{more}"

    def _drifted(self, hashes: Sequence[int]) -> list[int]:
        """The ranks that differ from most of those that should have the same."""
        alike = self.alike or [range(self.world)]
        return [ranks[index] for ranks in alike for index in minority(hashes[rank] for rank in ranks)]

    def _gathered(self, own: list[int], step: int, device: torch.device) -> list[list[int]] | BaseException:
        """The numbers of all ranks, one row each; or the error of the lane."""
        table = torch.zeros(self.world, len(own), dtype=torch.int64)
        table[self.rank] = torch.tensor(own)
        bucket = Bucket(
            flat=table.view(-1).to(device), layout=(Slot("hashes", table.shape),), step=step, rank=self.rank,
            world=self.world,
        )  # fmt: skip
        answer = self.lane.submit(_Table(), bucket)
        self.lane.drain()
        failure = self.lane.take_failure()
        return failure or answer.wait().view(self.world, -1).tolist()


def minority(hashes: Iterable[int]) -> list[int]:
    """The ranks that differ from the majority of those that vote; of two, the second."""
    votes = {rank: own for rank, own in enumerate(hashes) if own != NO_VOTE}
    usual = Counter(votes.values()).most_common(1)[0][0] if votes else NO_VOTE
    return [rank for rank, own in votes.items() if own != usual]


def hashes_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Those on a device are hashed there. State is not: a resumed rank may have it on the CPU."""
    there = {n: device_hash(w) for n, w in weights.items() if has_streams(w.device) and not w.is_complex()}
    found = torch.stack(list(there.values())).tolist() if there else []
    hashes = dict(zip(there, (own or 1 for own in found), strict=True))
    return {name: hashes[name] if name in hashes else hashed(weights[name]) for name in weights}


def hashed(content: object) -> int:
    """A hash of the bits of a tensor, of the items of a mapping, or of the text of anything else."""
    digest = sha256()  # processors have instructions for it: it takes a quarter of the time of blake2b
    if isinstance(content, Tensor):
        digest.update(content.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    elif isinstance(content, Mapping):
        for name in sorted(content):
            digest.update(f"{name} {hashed(content[name])}".encode())
    else:
        digest.update(repr(content).encode())
    return int.from_bytes(digest.digest()[:8], "little", signed=True) or 1  # 0 is no vote
