"""Which strategies are believed when they say that their result is bounded."""

from __future__ import annotations

from types import FunctionType, NoneType

from .strategy import Strategy, options, parts

PACKAGES = (__name__.partition(".")[0], "torch")
PLAIN = (NoneType, bool, int, float, str, tuple, list, dict)


def is_our_own(strategy: Strategy) -> bool:
    """Whether all parts of the strategy belong to this library or to torch.

    ``Reduced.bounded`` is about what was sent. A strategy, codec or function from elsewhere may change the
    result afterwards, in place and without a mark on the tensor: then the result itself must be checked.
    """
    return all(_is_known(value) for part in parts(strategy) for value in (part, *_options(part)))


def _options(strategy: Strategy) -> list[object]:
    return [value for _, _, value in options(strategy)]


def _is_known(value: object) -> bool:
    if type(value) in PLAIN:
        return True
    written = value if isinstance(value, FunctionType) else type(value)
    return (written.__module__ or "").partition(".")[0] in PACKAGES  # after exec it is None or "builtins"
