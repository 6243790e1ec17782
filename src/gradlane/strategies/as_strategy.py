"""Strategies as users give them: an object, or its text."""

from __future__ import annotations

import inspect

from ..core.strategy import Strategy
from ..errors import WrongType
from .suggestions import instead_of
from .text import parse


def as_strategy(value: object) -> Strategy:
    if isinstance(value, str):
        return parse(value)
    if isinstance(value, Strategy):
        return value
    if isinstance(value, type) and issubclass(value, Strategy):
        raise WrongType(f"got the class {value.__name__}; write {value.__name__}(...)")
    if (hint := instead_of(value)) is not None and not inspect.iscoroutinefunction(value):
        raise WrongType(f"{value!r} is not a strategy: {hint}")
    if callable(value):
        raise WrongType(
            f"got the function {getattr(value, '__qualname__', value)!r}, not a strategy; a torch hook "
            "goes to ddp.register_comm_hook(state, hook), an async function to gradlane.strategy_from"
        )
    raise WrongType(f"got a {type(value).__name__}, not a strategy; write gradlane.Mean(), say")
