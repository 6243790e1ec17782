"""What a rank has of its own between two rounds of local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

State = dict[str, Any]


def _nothing() -> State:
    return {}


class LocalState:
    """This rank's position, weights and optimizer state, for checkpoints.

    The session that trains gives the functions: ``collect`` makes the state, ``refuse`` raises on one that
    does not fit. A state that is loaded waits in ``loaded`` until all ranks have read theirs; the session
    takes it then. With another number of ranks, each continues from the anchor, with the optimizer state of
    one of the old ranks.
    """

    shared = False
    undoable = False

    def __init__(self) -> None:
        self.collect: Callable[[], State] = _nothing
        self.refuse: Callable[[Mapping[str, Any]], None] = lambda state: None
        self.loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> State:
        return self.collect()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.refuse(state)
        self.loaded = state

    def keep(self) -> None:
        """A round does not write to it."""

    undo = keep

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> State:
        state = dict(saved[rank % len(saved)])
        for own in ("weights", "buffers"):
            state.pop(own, None)
        return state

    def __deepcopy__(self, memo: object) -> LocalState:
        return LocalState()  # what it is bound to is one model's

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalState)

    __hash__ = None  # type: ignore[assignment]
