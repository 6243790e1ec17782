"""Calls from objects that outlive a session, and must not keep it alive: optimizers, lanes, torch's hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def weakly(method: Callable[P, T], default: T) -> Callable[P, T]:
    """Calls a method of an object without keeping the object; ``default`` when it is collected."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return default if (bound := found()) is None else bound(*args, **kwargs)

    return call
