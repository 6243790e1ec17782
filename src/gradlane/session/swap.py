"""Swapping strategies: the ranks agree on the new one, and the old one's states move to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ..agree.board import Board, Document
from ..agree.compare import as_note, refuse_differences, refuse_objections
from ..checkpoint.files import rearranged
from ..checkpoint.load import fitting_of
from ..checkpoint.tree import part_at
from ..core.memory import Memory
from ..core.strategy import Leaf, Strategy, named_states
from ..core.world_change import Slots
from ..errors import GradlaneError, InvalidValue
from ..strategies.accountant import Spent
from ..strategies.text import describe


class SwapAgreement:
    """The ranks compare step and strategy of each swap, and what else is to be the same; if anything differs,
    or one objects, all raise."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._swaps = 0

    def agree(
        self, step: int, strategy: Strategy, objection: GradlaneError | None, doing: str, also: Document
    ) -> None:
        compared = {"call": doing, "step": step, **also, "strategy": describe(strategy, shared_only=True)}
        note = {**compared, "objection": as_note(objection)}
        _, notes = self._board.agree(f"swap{self._swaps}", note, doing=doing)
        self._swaps += 1
        refuse_objections(notes, objection, doing)
        refuse_differences(notes, tuple(compared), doing)


def move_states(old: Strategy, new: Strategy, slots: Slots) -> list[str]:
    """Move the states of ``old`` to ``new``, as a load that is not strict does; return what was dropped.

    A residual that moved is removed from ``old``: it must not be sent twice.
    """
    return list(_moved(list(named_states(old)), list(named_states(new)), slots))


def _moved(before: list[Leaf], after: list[Leaf], slots: Slots) -> Iterator[str]:
    both = {id(leaf.state) for leaf in before} & {id(leaf.state) for leaf in after}
    before = [leaf for leaf in before if id(leaf.state) not in both]
    after = [leaf for leaf in after if id(leaf.state) not in both]
    targets = _targets(before, after)
    for leaf in before:
        if _is_empty(leaf) or isinstance(leaf.state, Spent):  # a ledger stays, and is followed: ledgers.py
            continue
        target = targets.get(leaf.path)
        if target is None:
            yield f"{leaf.owner}: the new strategy has no state for it"
        elif not _is_empty(target):
            yield f"{leaf.owner}: the new strategy came with one of its own"
        else:
            yield from _move(leaf, target, slots)


def _targets(before: list[Leaf], after: list[Leaf]) -> dict[tuple[str, ...], Leaf]:
    """The new state for each old one, by the path of the old one; decided as ``load`` does."""
    tokens: dict[str, Any] = {}
    for number, leaf in enumerate(before):
        branch = tokens
        for key in leaf.path[:-1]:
            branch = branch.setdefault(key, {})
        branch[leaf.path[-1]] = {"number": number}
    arranged, _ = rearranged(tokens, {leaf.path: leaf.owner for leaf in before}, after)
    found = {}
    for leaf in after:
        if token := part_at(arranged, leaf.path):
            found[before[token["number"]].path] = leaf
    return found


def _move(leaf: Leaf, target: Leaf, slots: Slots) -> Iterator[str]:
    state = leaf.state.state_dict()
    if isinstance(target.state, Memory):
        state = _converted(target.state, state, slots)
    fitting, wrong = fitting_of([target._replace(path=("it",))], {"it": state}, slots)
    yield from wrong
    try:
        target.state.load_state_dict(fitting.get("it", {}))
    except InvalidValue as error:
        yield f"{leaf.owner}: {error}"
        return
    with contextlib.suppress(InvalidValue):  # a state that cannot be empty stays as it is
        leaf.state.load_state_dict({})


def _converted(memory: Memory, state: Mapping[str, Any], slots: Slots) -> dict[str, Any]:
    """The tensors in the dtype that the memory keeps."""
    return {
        name: value.to(memory.width(slots[name].dtype))
        if isinstance(value, Tensor) and name in slots
        else value
        for name, value in state.items()
    }


def _is_empty(leaf: Leaf) -> bool:
    return not leaf.state.state_dict()
