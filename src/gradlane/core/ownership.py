"""Which model a state belongs to: the one that uses it, or that used it last."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

from torch import nn

ATTRIBUTE = "_gradlane_ownership"


class User(Protocol):
    """An attachment or a reducer: it lets a strategy work on a model."""

    def works_with(self, state: object) -> bool:
        """Whether it is open, and uses this very state."""


class Ownership:
    """One for each attachment or reducer. Every state of its strategy refers to it by an attribute.

    It refers to the user and to the model weakly. It loses both in pickle: a state that comes from another
    process may be used by anybody.
    """

    def __init__(self, user: User | None = None, model: nn.Module | None = None) -> None:
        self._user = None if user is None else weakref.ref(user)
        # Not the parameters: ``module.to`` swaps those of FSDP, and none that something refers to weakly.
        self._modules = [] if model is None else [weakref.ref(module) for module in _with_parameters(model)]
        self.used = False
        """A step has begun, or a checkpoint was loaded."""

    def is_of(self, model: nn.Module | None) -> bool:
        """Whether it has parameters of that model, in whatever wrapper."""
        if not self._modules or model is None:
            return True
        theirs = {id(module) for module in _with_parameters(model)}
        return any(id(module()) in theirs for module in self._modules)

    def works_with(self, state: object) -> bool:
        user = None if self._user is None else self._user()
        return user is not None and user.works_with(state)

    def __deepcopy__(self, memo: object) -> Ownership:
        return self  # the copy of a state belongs to the same model

    def __reduce__(self) -> Any:
        return Ownership, ()


def _with_parameters(model: nn.Module) -> list[nn.Module]:
    """The modules inside, that have parameters of their own."""
    return [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]


def ownership_of(state: object) -> Ownership | None:
    found = getattr(state, ATTRIBUTE, None)
    return found if isinstance(found, Ownership) else None


def set_ownership(state: object, ownership: Ownership) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # an object without attributes is not checked
        setattr(state, ATTRIBUTE, ownership)


def release(state: object) -> None:
    """Forget whose it was, unless it is in use: what a user has loaded into it may go to any model."""
    ownership = ownership_of(state)
    if ownership is not None and not ownership.works_with(state):
        delattr(state, ATTRIBUTE)
