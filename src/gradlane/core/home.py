"""Whose a state is: the model at which it is at work, or was last."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

from torch import nn

MARK = "_gradlane_home"


class Owner(Protocol):
    """What lets a strategy work on a model."""

    def works_with(self, state: object) -> bool:
        """Whether it is open, and this very state is at work in it."""


class Home:
    """One for each attachment or reducer; every state of its strategy has it as its mark.

    It knows it and the model weakly, and nothing at all after a trip through pickle: a state that comes from
    another process is anybody's.
    """

    def __init__(self, owner: Owner | None = None, model: nn.Module | None = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._parameters = [] if model is None else [weakref.ref(p) for p in model.parameters()]
        self.used = False
        """A step was begun there, or a checkpoint loaded."""

    def is_of(self, model: nn.Module | None) -> bool:
        """Whether it has parameters of that model, in whatever wrapper."""
        if not self._parameters or model is None:
            return True
        theirs = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter()) in theirs for parameter in self._parameters)

    def works_with(self, state: object) -> bool:
        owner = None if self._owner is None else self._owner()
        return owner is not None and owner.works_with(state)

    def __deepcopy__(self, memo: object) -> Home:
        return self  # the copy of a state is from where the state is from

    def __reduce__(self) -> Any:
        return Home, ()


def home_of(state: object) -> Home | None:
    found = getattr(state, MARK, None)
    return found if isinstance(found, Home) else None


def settle_in(state: object, home: Home) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # no room for a mark; then nobody looks after it
        setattr(state, MARK, home)


def let_go(state: object) -> None:
    """What was loaded into a state that is not at work was put there on purpose: it is for any model."""
    home = home_of(state)
    if home is not None and not home.works_with(state):
        delattr(state, MARK)
