"""What a strategy is: a coroutine over a bucket, and a dataclass of options and state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeGuard

from torch import Tensor

from ..errors import InvalidValue
from .bucket import Bucket
from .collectives import all_gather
from .ownership import release
from .scopes import Scopes
from .world_change import Fits, Fitting, OneField, Slots, State, carried


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Undoable(Protocol):
    """A state that can go back to before the current step, once ``undoable`` is set. Large states, such as a
    ``Memory``, keep two buffers. ``undo`` is called when a step failed, however far this rank has come in it,
    and when all ranks skipped the step at its end, unless the state has a ``skip``, which is then called."""

    undoable: bool
    shared: bool
    """All ranks have equal values in it."""

    def keep(self) -> None: ...
    def undo(self) -> None: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Called for every field in every step; ``isinstance`` of a protocol would take 10 us."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_undoable(state: object) -> TypeGuard[Undoable]:
    return all(hasattr(state, name) for name in ("undoable", "shared", "keep", "undo"))


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """What a strategy answers."""

    mean: Tensor
    """What every rank agreed on, bit for bit; same shape and dtype as ``bucket.flat``."""
    sent: Callable[[], Tensor] | None = None
    """My contribution as the others saw it, where ``bucket.wants_sent``; None: nothing was lost."""
    bounded: bool = False
    """What I sent is finite, and so small that the sum over all ranks cannot overflow. The strategy knows it
    by a check of its payload. If all ranks say so, nobody has to check the mean itself. It only counts of
    strategies of this library."""


class Strategy(ABC):
    """Decides what is sent, how it is combined, and what comes back.

    Make it a dataclass. A field that has a ``state_dict`` is state, every other field is an option.
    """

    fuses_feedback: ClassVar[bool] = False
    """Whether it computes error feedback by itself, from ``bucket.feedback``, in the same pass as its own
    work (see ``Feedback``)."""

    encodes: ClassVar[bool] = False
    """Whether it sends a codec's payload, which no ``Cast`` outside may narrow."""

    linear: ClassVar[bool] = False
    """Whether the answer depends only on the sum of the ranks' gradients of this step, and on what all ranks
    know: no memory of a rank's own, no rounding to codes before the sum. A wrapper answers for itself."""

    uses_nodes: ClassVar[bool] = False
    """Whether it asks over="node" or "cross"."""

    alike: ClassVar[bool] = True
    """Whether all ranks get the same bits, which replicas need. ``Noop`` says no."""

    takes: ClassVar[Literal["gradients", "weights"]] = "gradients"
    """What its buckets hold: ``attach`` gives gradients, ``local_steps`` weights."""

    keeps_privacy: ClassVar[bool] = True
    """Of a wrapper: whether the bound of a ``Private`` inside still holds. It does not where the strategy
    inside misses some gradients or steps, or gets gradients that were changed before."""

    @property
    def averages(self) -> bool:
        """Whether the answer is the mean of what the ranks say they ``sent``, but for the rounding of fp32.
        A wrapper asks the strategy inside."""
        return False

    @abstractmethod
    async def reduce(self, bucket: Bucket) -> Reduced:
        """Await collectives until every rank holds the same gradient."""

    @property
    def scatters(self) -> bool:
        """Whether it has a ``scatter``. A wrapper asks the strategy inside."""
        return False

    async def scatter(self, bucket: Bucket) -> Tensor:
        """This rank's part of the answer. ``bucket.flat`` holds one part for each rank, equally long."""
        raise InvalidValue(
            f"{type(self).__name__} reduces whole buckets, and cannot reduce one part per rank"
        )

    async def gather(self, bucket: Bucket) -> list[Tensor]:
        """Every rank's part. ``bucket.flat`` is this rank's, and all ranks get the same bits."""
        return [part for (part,) in await all_gather((bucket.flat,))]

    def check_world(self, world: int) -> None:  # noqa: B027  most accept any number
        """Refuse a number of ranks with which no step is possible; called before the first step. It speaks
        for this strategy alone: those inside are called too."""

    def enter(self, scopes: Scopes, slots: Slots) -> None:
        """Before the first step: the ranks and the parameters that it will work with. A wrapper that gives
        the strategies inside another world overrides it."""
        self.check_world(scopes.world)
        for _, field in stateful_fields(self):
            if isinstance(field, Strategy):
                field.enter(scopes, slots)

    def slots_inside(self, slots: Slots) -> Slots:
        """The parameters as the strategies inside see them."""
        return slots

    def refuses_inside(self, part: Strategy) -> str | None:
        """Why ``part`` must not be inside this strategy, at any depth, and the way out; None if it may."""
        return None

    def refuses_around(self, wrapper: Strategy) -> str | None:
        """Why ``wrapper`` must not be around this strategy, at any depth, and the way out; None if it may."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state of every field that has some, recursively; empty for a strategy without."""
        found = ((name, field.state_dict()) for name, field in stateful_fields(self))
        return {name: state for name, state in found if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = dict(stateful_fields(self))
        if unknown := sorted(set(state) - set(fields)):
            raise InvalidValue(
                f"{type(self).__name__} has no state called {', '.join(unknown)}; it has "
                f"{', '.join(fields) or 'none'}: load the state into the strategy that saved it"
            )
        for name, field in fields.items():
            field.load_state_dict(state.get(name, {}))
            release(field)

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """The state of ``rank`` of ``world`` ranks, made of what each rank of another world has saved.

        Each field decides for itself (see world_change.py). A strategy whose fields depend on each other
        overrides this.
        """
        found = (
            (name, carried(field, f"{type(self).__name__}.{name}", OneField(saved, name), rank, world))
            for name, field in stateful_fields(self)
        )
        return {name: state for name, state in found if state}


def options(strategy: object) -> Iterator[tuple[dataclasses.Field[Any] | None, str, Any]]:
    """What a constructor takes, as (dataclass field or None, name, value); a state may be among them."""
    for field, name, value in public_fields(strategy):
        if field is None or field.init:
            yield field, name, value


def public_fields(strategy: object) -> Iterator[tuple[dataclasses.Field[Any] | None, str, Any]]:
    """Options and state. Attributes under a leading underscore are neither: what is there can be computed
    again, or does not outlive a step."""
    if dataclasses.is_dataclass(strategy):
        for field in dataclasses.fields(strategy):
            if field.init or not field.name.startswith("_"):
                yield field, field.name, getattr(strategy, field.name)
    else:
        for name, value in vars(strategy).items():
            if not name.startswith("_"):
                yield None, name, value


def stateful_fields(strategy: object) -> Iterator[tuple[str, Stateful]]:
    """Fields with state; those inside a mapping (``Route``) as ``field[key]``."""
    for _, name, value in public_fields(strategy):
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if is_stateful(inner):
                    yield f"{name}[{key}]", inner
        elif is_stateful(value):
            yield name, value


def parts(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy and all strategies inside it, outermost first."""
    yield strategy
    for _, field in stateful_fields(strategy):
        if isinstance(field, Strategy):
            yield from parts(field)


class Leaf(NamedTuple):
    """A state inside a strategy, at any depth: its path, its owner (``ErrorFeedback.memory``), and itself."""

    path: tuple[str, ...]
    owner: str
    state: Stateful
    around: tuple[Strategy, ...] = ()
    """The strategies that it is inside of, outermost first."""

    def fitting(self, state: State, slots: Slots) -> Fitting:
        """The entries of a saved state that belong here, and why others do not."""
        if not isinstance(self.state, Fits):
            return dict(state), []
        for strategy in self.around:
            slots = strategy.slots_inside(slots)
        return self.state.fitting(state, slots)


def named_states(
    strategy: Strategy, path: tuple[str, ...] = (), around: tuple[Strategy, ...] = ()
) -> Iterator[Leaf]:
    around = (*around, strategy)
    for name, field in stateful_fields(strategy):
        if isinstance(field, Strategy):
            yield from named_states(field, (*path, name), around)
        else:
            yield Leaf((*path, name), f"{type(strategy).__name__}.{name}", field, around)


def shared_state(strategy: Strategy) -> dict[tuple[str, ...], dict[str, Any]]:
    """By path: the state that is equal on all ranks, bit for bit, unless something went wrong."""
    return {
        leaf.path: leaf.state.state_dict()
        for leaf in named_states(strategy)
        if getattr(leaf.state, "shared", False)
    }
