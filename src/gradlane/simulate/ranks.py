"""``Simulation``: n ranks in one process. A deadlock is an error here, not a hang."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from ..core.bucket import Bucket, Slot
from ..core.collectives import Note
from ..core.events import Event
from ..core.one_model import exclusive_states
from ..core.running import Running
from ..core.scopes import scopes_of
from ..core.scratch import Scratch
from ..core.strategy import Strategy
from ..errors import InvalidValue, RanksDisagree, WrongState, WrongType
from ..strategies.text import parse
from .after import check_equal_results, poison
from .buckets import flattened, nodes_of, split
from .lock_step import LockStep, StepDriver

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
        nodes = nodes_of(self.world, node_size)
        self.scopes = [scopes_of(rank, nodes) for rank in range(self.world)]
        self.sizes = self.scopes[0].sizes
        for own, scopes in zip(self.strategies, self.scopes, strict=True):
            own.enter(scopes, {})
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
        step = StepDriver(self.world, self.sizes)
        buckets: list[LockStep] = []
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
        self,
        step: StepDriver,
        gradients: Sequence[Gradients],
        layout: tuple[Slot, ...],
        index: int,
        count: int,
    ) -> LockStep:
        ranks = []
        sparse = gradients[0][layout[0].name].is_sparse
        for rank, (strategy, own) in enumerate(zip(self.strategies, gradients, strict=True)):
            flat = own[layout[0].name].clone() if sparse else flattened(own, layout)
            step.temporary.append(flat)
            bucket = Bucket(
                flat=flat, layout=layout, step=self.steps, rank=rank, world=self.world, index=index,
                is_last=index == count - 1, sizes=self.sizes, places=self.scopes[rank].places,
                scratch=None if sparse else self._scratch.setdefault((rank, index), Scratch()),
            )  # fmt: skip
            ranks.append(Running(strategy, bucket, self._take_note))
        return LockStep(ranks)

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
    states = [
        id(state) for own in strategies for state in {id(s): s for _, s in exclusive_states(own)}.values()
    ]
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
