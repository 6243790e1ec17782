"""Whose word counts when a strategy says that its answer need not be looked at."""

from __future__ import annotations

from .strategy import Strategy, options, parts

HOME = __name__.partition(".")[0]
KNOWN = (HOME, "builtins", "torch")


def is_our_own(strategy: Strategy) -> bool:
    """Whether it consists of nothing but parts of this library.

    ``Reduced.sound`` is said of what was sent. A strategy, codec or function of somebody else's may change
    the answer afterwards, in place and in ways that leave no mark on the tensor: then a look is needed.
    """
    return all(_home(value) in KNOWN for part in parts(strategy) for value in (part, *_options(part)))


def _options(strategy: Strategy) -> list[object]:
    return [value for _, _, value in options(strategy)]


def _home(value: object) -> str:
    where = type(value).__module__
    if where == "builtins" and callable(value):  # a function comes from where it was written
        where = value.__module__
    return where.partition(".")[0]
