"""The cost of a step: a strategy runs on meta tensors, and no number is computed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..core.bucket import Bucket, Layout, Slot
from ..core.collectives import Note, Payload, Request, check_parts
from ..core.events import Event
from ..core.running import Driver, Running
from ..core.scopes import Scopes, scopes_of
from ..core.strategy import Reduced, Strategy, named_states
from ..core.world_change import Expected
from ..errors import InvalidValue
from ..strategies.as_strategy import as_strategy
from ..strategies.local_steps import LocalSteps
from .buckets import Shape, nodes_of, slots_of, split


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step costs one rank: its requests, and their bytes."""

    events: tuple[Event, ...]
    raw_bytes: int
    """The gradient itself."""

    @property
    def collectives(self) -> int:
        return len(self.events)

    @property
    def payload_elements(self) -> int:
        return sum(event.payload_elements for event in self.events)

    @property
    def payload_bytes(self) -> int:
        """Bytes that one rank gives to the collectives."""
        return sum(event.payload_bytes for event in self.events)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank puts on the link, by the algorithm of each collective."""
        return sum(event.wire_bytes for event in self.events)

    def __str__(self) -> str:
        return (
            f"{self.collectives} collectives, {self.payload_elements:,} elements, "
            f"{self.payload_bytes:,} bytes of payload, {self.wire_bytes:,} bytes on the wire"
        )


def dry_run(
    strategy: Strategy | str,
    shapes: Mapping[str, Shape] | nn.Module,
    world: int,
    *,
    step: int | None = None,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int | None = None,
    node_size: int | None = None,
) -> StepCost:
    """The cost of one step of a strategy, for one rank of ``world``.

    ``shapes`` is ``{name: shape}`` or a module. ``step`` matters to schedules: a strategy may send something
    else after its warm-up. The default is the first step. The strategy itself does not change.

    Of ``LocalSteps`` the default is a round of the whole model. ``step`` counts steps of the optimizer: in
    the warm-up ``first`` is priced, then a round where one begins, and nothing in all other steps. A round
    also sends 64 bytes per other rank to call the roll, and the buffers, which no dry run knows.
    """
    strategy = as_strategy(strategy)
    if step is not None and step < 0:
        raise InvalidValue(f"step={step} is before the first; use 0 or more")
    slots = slots_of(shapes)
    if isinstance(strategy, LocalSteps) and step is not None:
        strategy, slots, step = _sent_in(strategy, slots, step)
    return price(
        strategy, slots, world, step=step or 0, dtype=dtype, bucket_bytes=bucket_bytes, node_size=node_size
    )


def price(
    strategy: Strategy,
    slots: Sequence[Slot],
    world: int,
    *,
    step: int,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int | None = None,
    node_size: int | None = None,
) -> StepCost:
    """The cost of one call of the strategy for these parameters; of ``LocalSteps``, of a round."""
    scopes = scopes_of(0, nodes_of(world, node_size))
    layouts = split(((slot, dtype) for slot in slots), bucket_bytes)
    raw_bytes = sum(slot.numel for slot in slots) * dtype.itemsize
    return StepCost(tuple(events_of(strategy, layouts, scopes, dtype, step)), raw_bytes)


def events_of(
    strategy: Strategy, layouts: Sequence[Layout], scopes: Scopes, dtype: torch.dtype, step: int
) -> list[Event]:
    """The requests of one step for these buckets. The strategy itself does not change."""
    strategy = emptied(strategy)
    strategy.enter(scopes, {slot.name: Expected(slot.shape, dtype) for layout in layouts for slot in layout})
    pricing = _Pricing(scopes.sizes)
    buckets: list[Running] = []
    for index, layout in enumerate(layouts):
        flat = torch.empty(sum(slot.numel for slot in layout), dtype=dtype, device="meta")
        bucket = Bucket(
            flat=flat, layout=layout, step=step, rank=scopes.rank, world=scopes.world, index=index,
            is_last=index == len(layouts) - 1, sizes=scopes.sizes, places=scopes.places,
        )  # fmt: skip
        buckets.append(Running(strategy, bucket, _ignore))
    pricing.drive(buckets)
    return pricing.events


def emptied(strategy: Strategy) -> Strategy:
    """A copy with empty states: those of a strategy at work have numbers, and a dry run has none."""
    emptied = copy.deepcopy(strategy)
    for leaf in named_states(emptied):
        with contextlib.suppress(InvalidValue):  # a state that is never empty holds no tensors
            leaf.state.load_state_dict({})
    return emptied


def _sent_in(
    strategy: LocalSteps, slots: tuple[Slot, ...], step: int
) -> tuple[Strategy, tuple[Slot, ...], int]:
    """What runs in a step of local training, the parameters that travel, and the number of the round."""
    if step < strategy.warmup:
        return strategy.first, slots, step
    fragment = strategy.due(step + 1)
    if fragment is None:
        return strategy, (), 0
    names = set(strategy.dealt({slot.name: slot.numel for slot in slots})[fragment])
    number = (step + 1 - strategy.warmup) // strategy.period - 1
    return strategy, tuple(slot for slot in slots if slot.name in names), number


class _Pricing(Driver[Running]):
    """Answers every request with meta tensors, and writes down its cost."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.events: list[Event] = []
        self._sizes = sizes

    @torch.no_grad()
    def drive(self, buckets: list[Running]) -> None:
        try:
            for running in buckets:
                self.serving = running
                running.resume()
                self.advance(running)
            self.meet(buckets)
        except (
            RuntimeError
        ) as error:  # torch's error for an operation that needs the numbers of a meta tensor
            if "meta" not in str(error).lower() or self.serving is None:
                raise
            raise InvalidValue(
                f"{self.serving.where()}: the strategy looks at numbers, a dry run has none ({error}); "
                "decide by shapes, or skip the decision where flat.device.type == 'meta'"
            ) from error

    def perform(self, running: Running, request: Request) -> object:
        size = self._sizes[request.over]
        self.events.append(Event.of(request, running.bucket, running.phase, size))
        return answer_like(request, size)

    def finished(self, running: Running, reduced: Reduced) -> None:
        """The result has no numbers."""


def answer_like(request: Request, size: int) -> object:
    """The answer of ``size`` ranks on meta tensors."""
    check_parts(request, size)
    if request.kind == "all_reduce":
        return request.payloads[0][0]
    if request.kind == "reduce_scatter":
        (tensor,) = request.payloads[0]
        return tensor.new_empty(tensor.numel() // size)
    return [_like(request.payloads[0])] * size  # without numbers all payloads are the same


def _like(payload: Payload) -> Payload:
    return tuple(part.new_empty(part.shape) for part in payload)


def _ignore(bucket: Bucket, note: Note) -> None:
    """Notes carry numbers, and a dry run has none."""
