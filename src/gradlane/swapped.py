"""What a strategy keeps goes over to the one that takes its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .checkpoint.files import rearranged
from .checkpoint.load import fitting_of
from .checkpoint.tree import part_at
from .core.memory import Memory
from .core.strategy import Leaf, Strategy, named_states
from .core.world_change import Slots
from .errors import InvalidValue
from .strategies.accountant import Spent


def moved_over(old: Strategy, new: Strategy, slots: Slots) -> list[str]:
    """Move the states of ``old`` to ``new``, as a load that is not strict would; what was dropped, in words.

    A residual that went over is gone from ``old``: it must not be sent twice.
    """
    return list(_moved(list(named_states(old)), list(named_states(new)), slots))


def _moved(before: list[Leaf], after: list[Leaf], slots: Slots) -> Iterator[str]:
    both = {id(leaf.state) for leaf in before} & {id(leaf.state) for leaf in after}
    before = [leaf for leaf in before if id(leaf.state) not in both]
    after = [leaf for leaf in after if id(leaf.state) not in both]
    places = _places(before, after)
    for leaf in before:
        if _is_empty(leaf) or isinstance(leaf.state, Spent):  # a ledger stays, and is followed: ledgers.py
            continue
        place = places.get(leaf.path)
        if place is None:
            yield f"{leaf.owner}: the new strategy has no place for it"
        elif not _is_empty(place):
            yield f"{leaf.owner}: the new strategy came with one of its own"
        else:
            yield from _taken(leaf, place, slots)


def _places(before: list[Leaf], after: list[Leaf]) -> dict[tuple[str, ...], Leaf]:
    """Where each state goes, by its path in the old strategy; decided as ``load`` does."""
    tokens: dict[str, Any] = {}
    for number, leaf in enumerate(before):
        place = tokens
        for key in leaf.path[:-1]:
            place = place.setdefault(key, {})
        place[leaf.path[-1]] = {"number": number}
    arranged, _ = rearranged(tokens, {leaf.path: leaf.owner for leaf in before}, after)
    found = {}
    for leaf in after:
        if token := part_at(arranged, leaf.path):
            found[before[token["number"]].path] = leaf
    return found


def _taken(leaf: Leaf, place: Leaf, slots: Slots) -> Iterator[str]:
    state = leaf.state.state_dict()
    if isinstance(place.state, Memory):
        state = _as_wide(place.state, state, slots)
    fitting, wrong = fitting_of([Leaf(("it",), place.owner, place.state)], {"it": state}, slots)
    yield from wrong
    try:
        place.state.load_state_dict(fitting.get("it", {}))
    except InvalidValue as error:
        yield f"{leaf.owner}: {error}"
        return
    with contextlib.suppress(InvalidValue):  # a state that cannot be empty stays as it is
        leaf.state.load_state_dict({})


def _as_wide(memory: Memory, state: Mapping[str, Any], slots: Slots) -> dict[str, Any]:
    return {
        name: value.to(memory.width(slots[name].dtype))
        if isinstance(value, Tensor) and name in slots
        else value
        for name, value in state.items()
    }


def _is_empty(leaf: Leaf) -> bool:
    return not leaf.state.state_dict()
