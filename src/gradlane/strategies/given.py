"""Strategies as users give them."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.strategy import Strategy, parts
from ..errors import WrongType
from ..log import log
from .route import Route
from .text import parse


def as_strategy(given: object) -> Strategy:
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Strategy):
        return given
    if isinstance(given, type) and issubclass(given, Strategy):
        raise WrongType(f"got the class {given.__name__}; write {given.__name__}(...)")
    if callable(given):
        raise WrongType(
            f"got the function {getattr(given, '__qualname__', given)!r}, not a strategy; a torch hook "
            "goes to ddp.register_comm_hook(state, hook), an async function to gradlane.strategy_from"
        )
    raise WrongType(f"got a {type(given).__name__}, not a strategy; write gradlane.Mean(), say")


def warn_of_unmatched(strategy: Strategy, names: Iterable[str]) -> None:
    names = tuple(names)
    for part in parts(strategy):
        if isinstance(part, Route) and (unmatched := part.unmatched(names)):
            log.warning("Route: no parameter matches %s", ", ".join(map(repr, unmatched)))
