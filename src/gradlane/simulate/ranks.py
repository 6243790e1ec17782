"""n ranks in one process, in lock-step: a deadlock is an error here, not a hang."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from ..core.bucket import Bucket, Slot
from ..core.collectives import Note
from ..core.events import Event
from ..core.one_model import exclusive_states
from ..core.running import Running, step_total
from ..core.scratch import Scratch
from ..core.strategy import Strategy, check_world
from ..errors import InvalidValue, RanksDisagree, WrongState, WrongType
from ..strategies.text import parse
from .after import must_be_alike, poison
from .answers import exchange
from .buckets import flattened, scope_sizes, split

Gradients = Mapping[str, Tensor]


class Simulation:
    """Runs a strategy on ``world`` simulated ranks; each has its own copy, and so its own memory.

    ``strategy`` is one strategy (or its text) for all ranks, or a list with one per rank.
    ``bucket_bytes`` cuts the gradients into buckets as DDP does; without it there is one per dtype.
    ``node_size`` says how many ranks share a node, for ``over="node"`` and ``over="cross"``.

    It is as strict as a network, and tells more: ranks that ask for different things, or get different
    answers (but for ``Noop``), are an error, and when a step is over its gradients, messages and buffers are
    filled with NaN.
    """

    def __init__(
        self,
        strategy: Strategy | str | Sequence[Strategy],
        world: int | None = None,
        *,
        bucket_bytes: int | None = None,
        node_size: int | None = None,
    ) -> None:
        self.strategies = _one_each(strategy, world)
        self.world = len(self.strategies)
        self.bucket_bytes = bucket_bytes
        self.sizes = scope_sizes(self.world, node_size)
        for own in self.strategies:
            check_world(own, self.world)
        self.steps = 0
        self._scratch: dict[tuple[int, int], Scratch] = {}  # by rank and bucket
        self._lent: list[Tensor] = []  # what is nobody's when the step is over
        self.events: list[Event] = []
        """Every request of rank 0, with its bytes."""
        self.figures: dict[str, float] = {}
        """What strategies noted (``overflow``, ...), summed over ranks and steps."""

    @torch.no_grad()
    def step(self, gradients: Sequence[Gradients]) -> list[dict[str, Tensor]]:
        """Reduce one ``{name: gradient}`` per rank; the gradients given are left as they were."""
        slots = self._checked(gradients)
        answers: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        asked, self._lent = len(self.events), []
        layouts = _layouts(slots, gradients[0], self.bucket_bytes)
        for rows in self._reduced(gradients, layouts):
            for answer, running in zip(answers, rows, strict=True):
                assert running.reduced is not None
                answer.update(running.bucket.with_flat(running.reduced.mean.clone()).named())
        must_be_alike(answers, self.strategies, self.steps, asked=len(self.events) > asked)
        poison(self._lent)
        poison(buffer for scratch in self._scratch.values() for buffer in scratch.buffers())
        self.steps += 1
        return [{name: answer[name] for name in gradients[0]} for answer in answers]

    def _checked(self, gradients: Sequence[Gradients]) -> list[Slot]:
        if len(gradients) != self.world:
            raise InvalidValue(
                f"got gradients of {len(gradients)} ranks for world={self.world}; give one dict per rank"
            )
        told = [[(name, grad.shape, grad.dtype) for name, grad in g.items()] for g in gradients]
        for rank, mine in enumerate(told):
            if mine != told[0]:
                theirs, own = next((a, b) for a, b in zip_longest(told[0], mine) if a != b)
                raise RanksDisagree(f"rank 0 gives {theirs}, rank {rank} gives {own}")
        return [Slot(name, grad.shape) for name, grad in gradients[0].items()]

    def _bucket(
        self, grads: Gradients, layout: tuple[Slot, ...], index: int, count: int, rank: int
    ) -> Bucket:
        sparse = grads[layout[0].name].is_sparse
        flat = grads[layout[0].name].clone() if sparse else flattened(grads, layout)
        self._lent.append(flat)
        scratch = None if sparse else self._scratch.setdefault((rank, index), Scratch())
        return Bucket(
            flat=flat, layout=layout, step=self.steps, rank=rank, world=self.world, index=index,
            is_last=index == count - 1, sizes=self.sizes, scratch=scratch,
        )  # fmt: skip

    def _reduced(
        self, gradients: Sequence[Gradients], layouts: list[tuple[Slot, ...]]
    ) -> Iterator[list[Running]]:
        """Bucket by bucket, all ranks of each; those that ask for a sum over the step once it is there."""
        waiting: list[list[Running]] = []
        try:
            for index, layout in enumerate(layouts):
                ranks = [
                    Running(s, self._bucket(g, layout, index, len(layouts), rank), self._take_note)
                    for rank, (s, g) in enumerate(zip(self.strategies, gradients, strict=True))
                ]
                waiting.append(ranks)
                if not self._meets(ranks, [None] * self.world):
                    yield waiting.pop()
            while waiting:
                totals = [step_total([ranks[rank] for ranks in waiting]) for rank in range(self.world)]
                for ranks in list(waiting):
                    if not self._meets(ranks, totals):
                        waiting.remove(ranks)
                        yield ranks
        finally:
            for ranks in waiting:
                for running in ranks:
                    running.close()

    def _meets(self, ranks: list[Running], answers: Sequence[object]) -> bool:
        """Drive one bucket to its end, or (True) to where it waits for the others of its step."""
        while True:
            requests = [rank.resume(answer) for rank, answer in zip(ranks, answers, strict=True)]
            if all(request is None for request in requests):
                waits = [rank for rank in ranks if rank.meeting is not None]
                if waits and len(waits) < len(ranks):
                    raise self._disagree(waits[0], "waits for the step's other buckets", ranks)
                return bool(waits)
            answers = self._exchanged(ranks)

    def _exchanged(self, ranks: list[Running]) -> list[object]:
        first = next(rank for rank in ranks if not rank.reduced and not rank.meeting)
        assert first.request is not None
        if any(rank.reduced or rank.meeting for rank in ranks):
            raise self._disagree(first, f"asks for {first.request}", ranks)
        over = first.request.over
        answers: list[object] = [None] * self.world
        for members in self._members(over):
            asked = [ranks[member].request for member in members]
            buckets = [ranks[member].bucket for member in members]
            replies = exchange([r for r in asked if r], buckets, self._lent)
            for member, reply in zip(members, replies, strict=True):
                answers[member] = reply
        self.events.append(Event.of(first.request, first.bucket, first.phase, self.sizes[over]))
        return answers

    @staticmethod
    def _disagree(one: Running, does: str, ranks: list[Running]) -> RanksDisagree:
        other = next(rank for rank in ranks if rank.reduced or (rank.meeting and not one.meeting))
        state = "has finished" if other.reduced else "waits for the step's other buckets"
        return RanksDisagree(
            f"step {one.bucket.step}, bucket {one.bucket.index}: rank {one.bucket.rank} {does}, "
            f"rank {other.bucket.rank} {state}; on a network this would hang"
        )

    def _members(self, over: str) -> Iterator[range]:
        node = self.sizes["node"]
        if over == "world":
            yield range(self.world)
        elif over == "node":
            yield from (range(start, start + node) for start in range(0, self.world, node))
        else:
            yield from (range(start, self.world, node) for start in range(node))

    def _take_note(self, bucket: Bucket, note: Note) -> None:
        for name, value in note.figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + float(value)


def _one_each(strategy: Strategy | str | Sequence[Strategy], world: int | None) -> list[Strategy]:
    if isinstance(strategy, str):
        strategy = parse(strategy)
    if isinstance(strategy, Strategy):
        if world is None:
            raise InvalidValue("world is missing; write Simulation(strategy, world=4)")
        if world < 1:
            raise InvalidValue(f"world={world} has no ranks; use 1 or more")
        return [copy.deepcopy(strategy) for _ in range(world)]
    strategies: list[Strategy] = list(strategy) if isinstance(strategy, Sequence) else []  # type: ignore[arg-type]
    if not strategies or not all(isinstance(part, Strategy) for part in strategies):
        raise WrongType(f"Simulation takes a strategy or one per rank, got {type(strategy).__name__}")
    if world is not None and world != len(strategies):
        raise InvalidValue(f"world={world}, but {len(strategies)} strategies; leave world out")
    kept = [
        id(state) for own in strategies for state in {id(s): s for _, s in exclusive_states(own)}.values()
    ]
    if len(set(kept)) < len(kept):
        raise WrongState(
            "two ranks of a simulation share what a strategy keeps, and would mix it; give one strategy and "
            "world=, or build one for each rank"
        )
    return strategies


def _layouts(slots: list[Slot], grads: Gradients, limit: int | None) -> list[tuple[Slot, ...]]:
    """Dense gradients together, each sparse one in a bucket of its own, as DDP has them."""
    dense = [(slot, grads[slot.name].dtype) for slot in slots if not grads[slot.name].is_sparse]
    if limit is None:  # one bucket per dtype
        order = list(dict.fromkeys(dtype for _, dtype in dense))
        dense.sort(key=lambda pair: order.index(pair[1]))
    return split(dense, limit) + [(slot,) for slot in slots if grads[slot.name].is_sparse]
