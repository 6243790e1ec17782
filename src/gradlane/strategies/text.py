"""Strategies as text: for the command line and config files. ``describe`` writes it, ``parse`` reads it."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from ..aggregate.adasum import AdaSum
from ..aggregate.centre import CenteredClipping, GeometricMedian
from ..aggregate.elementwise import Median, NearMedian, TrimmedMean
from ..aggregate.krum import Bulyan, Krum, MultiKrum
from ..aggregate.mean import mean
from ..aggregate.nnm import NNM
from ..aggregate.watch import Watch
from ..codecs.fp8 import Fp8
from ..codecs.natural import Natural
from ..codecs.randomk import RandomK
from ..codecs.raw import Raw
from ..codecs.sign import Sign
from ..codecs.topk import TopK
from ..codecs.uniform import Int2, Int4, Int8
from ..core.strategy import Strategy
from ..errors import InvalidValue, WrongType
from .cast import Cast
from .combined import Combined
from .described import describe, is_function
from .dgc import DGC
from .exchange import Gathered, Sharded, Summed
from .feedback import EF21, ErrorFeedback
from .lowrank.acpsgd import AcpSGD
from .lowrank.powersgd import PowerSGD
from .mean import Mean, Noop
from .momentum import WorkerMomentum
from .private import Private
from .route import Route
from .schedule import After
from .weighted import WeightedMean

__all__ = ["AGGREGATES", "CODECS", "DTYPES", "STRATEGIES", "describe", "parse", "wrote"]

STRATEGIES: dict[str, Callable[..., Any]] = {
    part.__name__: part
    for part in (
        *(Mean, Noop, Cast, WeightedMean, Private, After, Route),
        *(Summed, Gathered, Sharded, Combined, PowerSGD, AcpSGD),
        *(ErrorFeedback, EF21, DGC, WorkerMomentum),
    )
}
CODECS: dict[str, Callable[..., Any]] = {
    part.__name__: part for part in (Raw, Int8, Int4, Int2, Sign, Fp8, Natural, TopK, RandomK)
}
AGGREGATES: dict[str, Callable[..., Any]] = {
    part.__name__: part
    for part in (
        *(mean, Median, TrimmedMean, NearMedian, Krum, MultiKrum, Bulyan, GeometricMedian, CenteredClipping),
        *(AdaSum, NNM, Watch),
    )
}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


MOST_LEVELS = 100  # one inside the other; a strategy has less than ten


def parse(text: str, names: Mapping[str, Callable[..., Any]] | None = None) -> Strategy:
    """Read a strategy from text such as ``Cast(Mean(), bfloat16)``.

    Only known names, numbers, strings, lists, tuples, dicts and dtypes are read; nothing is
    evaluated or imported. ``names`` adds classes of your own: ``{"MajorityVote": MajorityVote}``.
    """
    if not isinstance(text, str):
        raise WrongType(f"parse reads text, got {type(text).__name__}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a backslash that means nothing, a number run into a name
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError, Warning) as error:
        raise InvalidValue(f"{_in_short(text)} is not a strategy: {error}") from None
    known = {**STRATEGIES, **CODECS, **AGGREGATES, **(names or {})}
    strategy = _read(tree, known, _in_short(text), MOST_LEVELS)
    if strategy is known.get(text.strip()) and not is_function(strategy):
        raise InvalidValue(f"{text!r} is a name only; write {text.strip()}()")
    if not isinstance(strategy, Strategy):
        raise InvalidValue(f"{_in_short(text)} reads as a {type(strategy).__name__}, not as a strategy")
    return strategy


def _in_short(text: str) -> str:
    """For messages: nobody reads a page of it."""
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
    """What a call of a known name stands for."""
    if part is None or isinstance(part, torch.dtype) or is_function(part):
        raise InvalidValue(f"{name} in {text} takes no arguments; write it without brackets")
    if any(word.arg is None for word in keywords) or any(isinstance(arg, ast.Starred) for arg in args):
        raise InvalidValue(f"* and ** are not read in {text}; write the arguments out")
    words = [str(word.arg) for word in keywords]
    if twice := [word for word in words if words.count(word) > 1]:
        raise InvalidValue(f"{name} in {text} has {twice[0]} twice; say it once")
    values, named = [read(arg) for arg in args], {str(word.arg): read(word.value) for word in keywords}
    try:
        return part(*values, **named)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        # What a class says of its options is said here of the text; as it is where it is of ours already.
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
    near = get_close_matches(name, [*known, *DTYPES], n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    raise InvalidValue(f"{name!r} in {text} is not known; {hint}")


def wrote(strategy: Strategy, text: str) -> bool:
    """Whether a state that says it was saved by ``text`` is of this strategy.

    Up to 0.1 defaults were left out of what was saved, and an option may have come since: both are taken
    for what they are by default today.
    """
    mine = describe(strategy, shared_only=True)
    if text in (mine, describe(strategy, short=True, shared_only=True)):
        return True
    try:
        return describe(parse(text), shared_only=True) == mine
    except InvalidValue:
        return False
