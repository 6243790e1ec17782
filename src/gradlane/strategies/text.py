"""Strategies as text, for the command line and config files: ``describe`` writes it, ``parse`` reads it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from inspect import isabstract
from typing import Any

import torch

from ..aggregate.rule import Rule
from ..aggregate.watch import Watch
from ..codecs.base import Codec
from ..core.strategy import Strategy
from ..errors import InvalidValue, WrongType
from .describe import describe, is_function
from .suggestions import instead_of, instead_of_name, objection_to_arguments

__all__ = ["DTYPES", "describe", "exported_parts", "parse", "saved_by"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
OPTION = re.compile(r"\s*\w+\s*=[^=]")
MOST_LEVELS = 100  # of calls inside calls; a strategy has less than ten


@cache
def exported_parts() -> dict[str, Callable[..., Any]]:
    """All strategies, codecs and aggregates that the package exports, by name."""
    package = import_module(__name__.partition(".")[0])
    exported = {name: getattr(package, name) for name in package.__all__}
    return {name: part for name, part in exported.items() if _is_part(part)}


def _is_part(exported: object) -> bool:
    if isinstance(exported, type):
        return issubclass(exported, Strategy | Codec | Rule | Watch) and not isabstract(exported)
    return is_function(exported)


def parse(text: str, names: Mapping[str, Callable[..., Any]] | None = None) -> Strategy:
    """Read a strategy from text such as ``Cast(Mean(), bfloat16)``.

    Known are the strategies, codecs and aggregates that the package exports, numbers, strings, lists, tuples,
    dicts and dtypes; the text is not evaluated, and imports nothing. ``names`` adds classes of your own:
    ``{"MajorityVote": MajorityVote}``.
    """
    if not isinstance(text, str):
        raise WrongType(f"parse reads text, got {type(text).__name__}")
    if not text.strip():
        raise InvalidValue(f"{text!r} is not a strategy: it is empty; write Mean(), say")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a backslash that means nothing, a number run into a name
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError, Warning) as error:
        if OPTION.match(text):
            raise InvalidValue(
                f"{_in_short(text)} is an option and no strategy; it stands in the brackets of one, as in "
                "Sharded(Int8(rotate=True))"
            ) from None
        why = error.msg if isinstance(error, SyntaxError) else error  # without its place: it is one line
        raise InvalidValue(f"{_in_short(text)} is not a strategy: {why}") from None
    known = {**exported_parts(), **(names or {})}
    strategy = _read(tree, known, _in_short(text), MOST_LEVELS)
    if strategy is known.get(text.strip()) and not is_function(strategy):
        raise InvalidValue(f"{text!r} is a name only; write {text.strip()}()")
    if not isinstance(strategy, Strategy):
        hint = instead_of(strategy) or f"it reads as {type(strategy).__name__}"
        raise InvalidValue(f"{_in_short(text)} is not a strategy: {hint}")
    return strategy


def _in_short(text: str) -> str:
    """The text for messages, cut where it is long."""
    return repr(text) if len(text) <= 500 else f"{text[:200]!r}... ({len(text):,} characters)"


def _read(node: ast.expr, known: Mapping[str, Callable[..., Any]], text: str, levels: int) -> Any:
    if not levels:
        raise InvalidValue(f"{text} has more than {MOST_LEVELS} levels, one inside the other; use fewer")

    def read(inner: ast.expr) -> Any:
        return _read(inner, known, text, levels - 1)

    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _made(_known(name, known, text), name, args, keywords, text, read)
        case ast.Name(id=name):
            return _known(name, known, text)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in DTYPES:
            return DTYPES[name]
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, int | float):
            return -value
        case ast.List(elts=items):
            return [read(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(read(item) for item in items)
        case ast.Dict(keys=keys, values=items) if None not in keys:
            return _pairs(
                [(read(key), read(item)) for key, item in zip(keys, items, strict=True) if key], text
            )
    raise InvalidValue(
        f"{_source(node)} in {text} is not read; use known names, numbers, strings, "
        "lists, tuples, dicts and dtypes"
    )


def _made(
    part: Any,
    name: str,
    args: Sequence[ast.expr],
    keywords: Sequence[ast.keyword],
    text: str,
    read: Callable[[ast.expr], Any],
) -> Any:
    """Call a known class with the arguments of the text."""
    if part is None or isinstance(part, torch.dtype) or is_function(part):
        raise InvalidValue(f"{name} in {text} takes no arguments; write it without brackets")
    if any(word.arg is None for word in keywords) or any(isinstance(arg, ast.Starred) for arg in args):
        raise InvalidValue(f"* and ** are not read in {text}; write the arguments out")
    words = [str(word.arg) for word in keywords]
    if twice := [word for word in words if words.count(word) > 1]:
        raise InvalidValue(f"{name} in {text} has {twice[0]} twice; say it once")
    values, named = [read(arg) for arg in args], {str(word.arg): read(word.value) for word in keywords}
    if wrong := objection_to_arguments(part, name, values, named):
        raise InvalidValue(f"{wrong}; the text is {text}")
    try:
        return part(*values, **named)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        # An error of our own names the option already; any other gets the text as context.
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(f"{name} in {text}: {error}") from None


def _pairs(pairs: Sequence[tuple[Any, Any]], text: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str | int | float):
            raise InvalidValue(f"{key!r} in {text} cannot be a key; keys are strings and numbers")
        if key in found:
            raise InvalidValue(f"{text} has the key {key!r} twice; say it once")
        found[key] = value
    return found


def _source(node: ast.expr) -> str:
    try:
        return _in_short(ast.unparse(node))
    except RecursionError:
        return "an expression as deep as this"


def _known(name: str, known: Mapping[str, Callable[..., Any]], text: str) -> Any:
    if name in DTYPES:
        return DTYPES[name]
    if name in known:
        return known[name]
    raise InvalidValue(f"{name!r} in {text} is not known; {instead_of_name(name, known, DTYPES)}")


def saved_by(strategy: Strategy, text: str) -> bool:
    """Whether a state that was saved by the strategy ``text`` is one of this strategy.

    Version 0.1 left defaults out of the text, and an option may have been added since: options that are not
    in the text have today's defaults.
    """
    own = describe(strategy, shared_only=True)
    if text in (own, describe(strategy, short=True, shared_only=True)):
        return True
    try:
        return describe(parse(text), shared_only=True) == own
    except InvalidValue:
        return False
