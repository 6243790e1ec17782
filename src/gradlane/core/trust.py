"""Whose word counts when a strategy says that its answer need not be looked at."""

from __future__ import annotations

from types import FunctionType, NoneType

from .strategy import Strategy, options, parts

PACKAGES = (__name__.partition(".")[0], "torch")
PLAIN = (NoneType, bool, int, float, str, tuple, list, dict)


def is_our_own(strategy: Strategy) -> bool:
    """Whether it consists of nothing but parts of this library.

    ``Reduced.bounded`` is said of what was sent. A strategy, codec or function of somebody else's may change
    the answer afterwards, in place and in ways that leave no mark on the tensor: then a look is needed.
    """
    return all(_is_known(value) for part in parts(strategy) for value in (part, *_options(part)))


def _options(strategy: Strategy) -> list[object]:
    return [value for _, _, value in options(strategy)]


def _is_known(value: object) -> bool:
    if type(value) in PLAIN:
        return True
    written = value if isinstance(value, FunctionType) else type(value)
    return (written.__module__ or "").partition(".")[0] in PACKAGES  # exec leaves None, or "builtins"
