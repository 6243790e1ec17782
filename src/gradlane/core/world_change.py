"""What becomes of state when a run goes on with another number of ranks.

A state says so itself, by what it has beside ``state_dict`` and ``load_state_dict``:

- ``shared``: whether it is the same on all ranks, bit for bit.
- ``carried(saved, rank, world)``: the state of ``rank`` of ``world`` ranks, made of what each rank of another
  world has saved.
- ``fitting(state, slots)``: the entries of a saved state that belong to this model, and for each other one a
  message that says why it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from ..errors import InvalidValue

State = Mapping[str, Any]


class Expected(NamedTuple):
    """A parameter as a memory sees it: complex ones have one more dimension, of 2."""

    shape: torch.Size
    dtype: torch.dtype


Slots = Mapping[str, Expected]
Fitting = tuple[dict[str, Any], list[str]]


@runtime_checkable
class Carried(Protocol):
    def carried(self, saved: Sequence[State], rank: int, world: int) -> dict[str, Any]: ...


@runtime_checkable
class Fits(Protocol):
    def fitting(self, state: State, slots: Slots) -> Fitting: ...


class Shared:
    """State that is equal on all ranks, so that any number of ranks can go on with it."""

    shared: ClassVar[bool] = True

    def carried(self, saved: Sequence[State], rank: int, world: int) -> dict[str, Any]:
        return dict(saved[0])


class OneField(Sequence[State]):
    """One field of each rank's state, read when it is needed: so not all ranks' files are read."""

    def __init__(self, saved: Sequence[State], name: str) -> None:
        self._saved, self._name = saved, name

    @overload
    def __getitem__(self, rank: int) -> State: ...
    @overload
    def __getitem__(self, rank: slice) -> list[State]: ...
    def __getitem__(self, rank: int | slice) -> State | list[State]:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        found = self._saved[rank].get(self._name, {})
        if not isinstance(found, Mapping):
            raise InvalidValue(f"{self._name!r} of rank {rank} is a {type(found).__name__}, not a state")
        return found

    def __len__(self) -> int:
        return len(self._saved)


def carried(field: object, name: str, saved: Sequence[State], rank: int, world: int) -> dict[str, Any]:
    if isinstance(field, Carried):
        return field.carried(saved, rank, world)
    if any(saved):
        raise InvalidValue(
            f"{name} ({type(field).__name__}) does not say what becomes of it with {world} ranks instead of "
            f"{len(saved)}; give it a method carried(saved, rank, world), or go on with {len(saved)} ranks"
        )
    return {}


def summed(saved: Sequence[State], rank: int, world: int) -> dict[str, Tensor]:
    """Rank j of m takes the sum of the old ranks i with i % m == j; additional ranks begin with nothing.

    So the sum over all ranks does not change: a gradient that waits in a residual will count as much as any
    other gradient of the step in which it arrives.
    """
    own = [saved[old] for old in range(rank, len(saved), world)]
    return {name: _sum_of(name, own) for name in dict.fromkeys(name for state in own for name in state)}


def _sum_of(name: str, states: Sequence[State]) -> Tensor:
    tensors: list[Tensor] = [state[name] for state in states if name in state]
    if len({tensor.shape for tensor in tensors}) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise InvalidValue(f"the ranks have saved {name!r} with different shapes, {shapes}; one is damaged")
    if len(tensors) == 1:
        return tensors[0]
    total = tensors[0].double()
    for tensor in tensors[1:]:
        total = total + tensor.double()
    return total.to(tensors[0].dtype)


def misfit(tensor: object) -> str | None:
    """Why this cannot be in a memory, whatever parameter it is for; None if it can."""
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}; a memory holds tensors"
    if not tensor.is_floating_point():
        return f"is of {tensor.dtype}; a memory holds floating-point numbers"
    if tensor.device.type != "meta" and not tensor.isfinite().all():
        return "has values that are not finite"
    return None


def sorted_out(state: State, why_not: Iterator[tuple[str, str | None]]) -> Fitting:
    """The entries of a state without an objection, and the objections."""
    objections = {name: why for name, why in why_not if why is not None}
    kept = {name: value for name, value in state.items() if name not in objections}
    return kept, [f"{name!r} {why}" for name, why in objections.items()]
