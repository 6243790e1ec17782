"""Which strategies may be inside which: one walk over what each of them refuses.

A strategy says what it refuses in ``refuses_inside`` and ``refuses_around``; both name the way out. A wrapper
calls ``check_wrapped`` or ``check_nesting`` when it is made. So a new wrapper states its own rules, and
touches no other file.
"""

from __future__ import annotations

from ..core.strategy import Strategy, parts
from ..errors import InvalidValue, WrongType


def check_wrapped(wrapper: Strategy, inner: object, example: str) -> None:
    """Refuse what is not a strategy, and what must not be inside this wrapper."""
    if not isinstance(inner, Strategy):
        name, got = type(wrapper).__name__, type(inner).__name__
        raise WrongType(f"{name} wraps a strategy, got {got}; write {example}")
    check_nesting(wrapper)


def check_nesting(wrapper: Strategy) -> None:
    """Refuse what must not be inside this strategy, at any depth, with the reason of whoever refuses."""
    inside = [part for part in parts(wrapper) if part is not wrapper]
    reasons = [part.refuses_around(wrapper) for part in inside]
    reasons += [wrapper.refuses_inside(part) for part in inside]
    for reason in filter(None, reasons):
        raise InvalidValue(reason)
