"""All ranks of a simulation in lock-step, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ..core.collectives import Request, StepSum
from ..core.events import Event
from ..core.running import Driver, Running, State, step_total
from ..core.strategy import Reduced
from ..errors import RanksDisagree
from .answers import exchange


class LockStep:
    """One bucket on all ranks, in lock-step."""

    def __init__(self, ranks: list[Running]) -> None:
        self.ranks = ranks
        self.state: State | None = None

    def resume(self, answers: Sequence[object]) -> State:
        for rank, answer in zip(self.ranks, answers, strict=True):
            rank.resume(answer)
        self.state = state = self._common_state()
        return state

    def _common_state(self) -> State:
        """The state of the first rank, if all ranks are in states of one kind."""
        one = min(self.ranks, key=_kind)
        for other in self.ranks:
            if _kind(other) != _kind(one):
                bucket = one.bucket
                raise RanksDisagree(
                    f"step {bucket.step}, bucket {bucket.index}: rank {bucket.rank} {_doing(one)}, "
                    f"rank {other.bucket.rank} {_doing(other)}; on a network this would hang"
                )
        assert one.state is not None
        return one.state

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class StepDriver(Driver[LockStep]):
    """One step of all ranks."""

    def __init__(self, world: int, sizes: Mapping[str, int]) -> None:
        self.results: list[dict[str, Tensor]] = [{} for _ in range(world)]
        self.events: list[Event] = []
        self.temporary: list[Tensor] = []  # what the next step overwrites on a network
        self._sizes = sizes

    def perform(self, running: LockStep, request: Request) -> object:
        answers: list[object] = [None] * len(running.ranks)
        for members in _members(request.over, len(running.ranks), self._sizes["node"]):
            ranks = [running.ranks[member] for member in members]
            requests = [rank.state for rank in ranks if isinstance(rank.state, Request)]
            replies = exchange(requests, [rank.bucket for rank in ranks], self.temporary)
            for member, reply in zip(members, replies, strict=True):
                answers[member] = reply
        first = running.ranks[0]
        self.events.append(Event.of(request, first.bucket, first.phase, self._sizes[request.over]))
        return answers

    def finished(self, running: LockStep, reduced: Reduced) -> None:
        for result, rank in zip(self.results, running.ranks, strict=True):
            assert isinstance(rank.state, Reduced)
            result.update(rank.bucket.with_flat(rank.state.mean.clone()).named())

    def total(self, waiting: Sequence[LockStep]) -> object:
        return [step_total([bucket.ranks[rank] for bucket in waiting]) for rank in range(len(self.results))]


def _kind(rank: Running) -> int:
    """A message names a rank that asks before one that waits, and that before one that has finished."""
    return 0 if isinstance(rank.state, Request) else 1 if isinstance(rank.state, StepSum) else 2


def _doing(rank: Running) -> str:
    if isinstance(rank.state, Request):
        return f"asks for {rank.state}"
    return "has finished" if isinstance(rank.state, Reduced) else "waits for the step's other buckets"


def _members(over: str, world: int, node: int) -> Iterator[range]:
    """The ranks of each group of a scope."""
    if over == "world":
        yield range(world)
    elif over == "node":
        yield from (range(start, start + node) for start in range(0, world, node))
    else:
        yield from (range(start, world, node) for start in range(node))
