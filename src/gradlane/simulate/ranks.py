"""n ranks in one process, in lock-step: a deadlock is an error here, not a hang."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from ..core.bucket import Bucket, Slot
from ..core.claims import held
from ..core.collectives import Note, Request, StepSum
from ..core.events import Event
from ..core.running import Driver, Running, State, step_total
from ..core.scratch import Scratch
from ..core.strategy import Reduced, Strategy, check_world
from ..errors import InvalidValue, RanksDisagree, WrongState, WrongType
from ..strategies.text import parse
from .after import check_equal_results, poison
from .answers import exchange
from .buckets import flattened, scope_sizes, split

Gradients = Mapping[str, Tensor]


class Simulation:
    """Runs a strategy on ``world`` simulated ranks; each has its own copy, and so its own memory.

    ``strategy`` is one strategy (or its text) for all ranks, or a list with one per rank.
    ``bucket_bytes`` cuts the gradients into buckets as DDP does; without it there is one per dtype.
    ``node_size`` says how many ranks share a node, for ``over="node"`` and ``over="cross"``.

    It is as strict as a network, and its errors say more. Ranks that ask for different things, or that get
    different results (unless the strategy is ``Noop``), raise ``RanksDisagree``. After each step its
    gradients, messages and buffers are filled with NaN, so that a strategy that keeps one of them is noticed.
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
        self.events: list[Event] = []
        """Every request of rank 0, with its bytes."""
        self.figures: dict[str, float] = {}
        """The figures of ``note`` (``overflow``, ...), summed over ranks and steps."""

    @torch.no_grad()
    def step(self, gradients: Sequence[Gradients]) -> list[dict[str, Tensor]]:
        """Reduce one ``{name: gradient}`` per rank. The gradients passed in do not change."""
        slots = self._checked(gradients)
        layouts = _layouts(slots, gradients[0], self.bucket_bytes)
        step = _Step(self.world, self.sizes)
        buckets: list[_Ranks] = []
        try:
            for index, layout in enumerate(layouts):
                buckets.append(self._bucket(step, gradients, layout, index, len(layouts)))
                buckets[-1].resume([None] * self.world)
                step.advance(buckets[-1])
            step.meet(buckets)
        finally:
            self.events += step.events
            for bucket in buckets:
                bucket.close()
        check_equal_results(step.results, self.strategies, self.steps, asked=bool(step.events))
        poison(step.temporary)
        poison(buffer for scratch in self._scratch.values() for buffer in scratch.buffers())
        self.steps += 1
        return [{name: result[name] for name in gradients[0]} for result in step.results]

    def _checked(self, gradients: Sequence[Gradients]) -> list[Slot]:
        if len(gradients) != self.world:
            raise InvalidValue(
                f"got gradients of {len(gradients)} ranks for world={self.world}; give one dict per rank"
            )
        shapes = [[(name, grad.shape, grad.dtype) for name, grad in g.items()] for g in gradients]
        for rank, mine in enumerate(shapes):
            if mine != shapes[0]:
                theirs, own = next((a, b) for a, b in zip_longest(shapes[0], mine) if a != b)
                raise RanksDisagree(f"rank 0 gives {theirs}, rank {rank} gives {own}")
        return [Slot(name, grad.shape) for name, grad in gradients[0].items()]

    def _bucket(
        self, step: _Step, gradients: Sequence[Gradients], layout: tuple[Slot, ...], index: int, count: int
    ) -> _Ranks:
        ranks = []
        sparse = gradients[0][layout[0].name].is_sparse
        for rank, (strategy, own) in enumerate(zip(self.strategies, gradients, strict=True)):
            flat = own[layout[0].name].clone() if sparse else flattened(own, layout)
            step.temporary.append(flat)
            bucket = Bucket(
                flat=flat, layout=layout, step=self.steps, rank=rank, world=self.world, index=index,
                is_last=index == count - 1, sizes=self.sizes,
                scratch=None if sparse else self._scratch.setdefault((rank, index), Scratch()),
            )  # fmt: skip
            ranks.append(Running(strategy, bucket, self._take_note))
        return _Ranks(ranks)

    def _take_note(self, bucket: Bucket, note: Note) -> None:
        for name, value in note.figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + float(value)


class _Ranks:
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
        for kind in (Request, StepSum, Reduced):
            if one := [rank for rank in self.ranks if isinstance(rank.state, kind)]:
                others = [rank for rank in self.ranks if not isinstance(rank.state, kind)]
                break
        if others:
            bucket = one[0].bucket
            raise RanksDisagree(
                f"step {bucket.step}, bucket {bucket.index}: rank {bucket.rank} {_doing(one[0])}, "
                f"rank {others[0].bucket.rank} {_doing(others[0])}; on a network this would hang"
            )
        assert one[0].state is not None
        return one[0].state

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class _Step(Driver[_Ranks]):
    """One step of all ranks."""

    def __init__(self, world: int, sizes: Mapping[str, int]) -> None:
        self.results: list[dict[str, Tensor]] = [{} for _ in range(world)]
        self.events: list[Event] = []
        self.temporary: list[Tensor] = []  # what the next step overwrites on a network
        self._sizes = sizes

    def perform(self, running: _Ranks, request: Request) -> object:
        answers: list[object] = [None] * len(running.ranks)
        for members in _members(request.over, self._sizes):
            ranks = [running.ranks[member] for member in members]
            requests = [rank.state for rank in ranks if isinstance(rank.state, Request)]
            replies = exchange(requests, [rank.bucket for rank in ranks], self.temporary)
            for member, reply in zip(members, replies, strict=True):
                answers[member] = reply
        first = running.ranks[0]
        self.events.append(Event.of(request, first.bucket, first.phase, self._sizes[request.over]))
        return answers

    def finished(self, running: _Ranks, reduced: Reduced) -> None:
        for result, rank in zip(self.results, running.ranks, strict=True):
            assert isinstance(rank.state, Reduced)
            result.update(rank.bucket.with_flat(rank.state.mean.clone()).named())

    def total(self, waiting: Sequence[_Ranks]) -> object:
        return [step_total([bucket.ranks[rank] for bucket in waiting]) for rank in range(len(self.results))]


def _doing(rank: Running) -> str:
    if isinstance(rank.state, Request):
        return f"asks for {rank.state}"
    return "has finished" if isinstance(rank.state, Reduced) else "waits for the step's other buckets"


def _members(over: str, sizes: Mapping[str, int]) -> Iterator[range]:
    """The ranks of each group of a scope."""
    world, node = sizes["world"], sizes["node"]
    if over == "world":
        yield range(world)
    elif over == "node":
        yield from (range(start, start + node) for start in range(0, world, node))
    else:
        yield from (range(start, world, node) for start in range(node))


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
    states = [id(state) for own in strategies for state in {id(s): s for _, s in held(own)}.values()]
    if len(set(states)) < len(states):
        raise WrongState(
            "two ranks of a simulation share the state of a strategy, and would mix it up; give one strategy "
            "and world=, or build one for each rank"
        )
    return strategies


def _layouts(slots: list[Slot], grads: Gradients, limit: int | None) -> list[tuple[Slot, ...]]:
    """Dense gradients together, each sparse one in a bucket of its own, as DDP does it."""
    dense = [(slot, grads[slot.name].dtype) for slot in slots if not grads[slot.name].is_sparse]
    if limit is None:  # one bucket per dtype
        order = list(dict.fromkeys(dtype for _, dtype in dense))
        dense.sort(key=lambda pair: order.index(pair[1]))
    return split(dense, limit) + [(slot,) for slot in slots if grads[slot.name].is_sparse]
