"""Strategies as text: for the command line, config files, and what ranks compare at attach."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from ..aggregate.adasum import AdaSum
from ..aggregate.centre import CenteredClipping, GeometricMedian
from ..aggregate.krum import Bulyan, Krum, MultiKrum
from ..aggregate.mean import mean
from ..aggregate.middle import Median, NearMedian, TrimmedMean
from ..aggregate.mixing import NNM
from ..aggregate.watch import Watch
from ..codecs.fp8 import Fp8
from ..codecs.natural import Natural
from ..codecs.randomk import RandomK
from ..codecs.raw import Raw
from ..codecs.sign import Sign
from ..codecs.topk import TopK
from ..codecs.uniform import Int2, Int4, Int8
from ..core.strategy import Strategy, is_stateful, options
from ..errors import InvalidValue, WrongType
from .cast import Cast
from .combined import Combined
from .dgc import DGC
from .exchange import Gathered, Sharded, Summed
from .feedback import ErrorFeedback, ErrorFeedback21
from .lowrank.acpsgd import AcpSGD
from .lowrank.powersgd import PowerSGD
from .mean import Mean, Noop
from .momentum import WorkerMomentum
from .private import Private
from .route import Route
from .schedule import After
from .weighted import WeightedMean

STRATEGIES: dict[str, Callable[..., Any]] = {
    part.__name__: part
    for part in (
        *(Mean, Noop, Cast, WeightedMean, Private, After, Route),
        *(Summed, Gathered, Sharded, Combined, PowerSGD, AcpSGD),
        *(ErrorFeedback, ErrorFeedback21, DGC, WorkerMomentum),
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


def parse(text: str, names: Mapping[str, Callable[..., Any]] | None = None) -> Strategy:
    """Read a strategy from text such as ``Cast(Mean(), bfloat16)``.

    Only known names, numbers, strings, lists, tuples, dicts and dtypes are read; nothing is
    evaluated or imported. ``names`` adds classes of your own: ``{"MajorityVote": MajorityVote}``.
    """
    if not isinstance(text, str):
        raise WrongType(f"parse reads text, got {type(text).__name__}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidValue(f"{text!r} is not a strategy: {error}") from None
    known = {**STRATEGIES, **CODECS, **AGGREGATES, **(names or {})}
    strategy = _read(tree, known, text)
    if strategy is known.get(text.strip()) and not _is_function(strategy):
        raise InvalidValue(f"{text!r} is a name only; write {text.strip()}()")
    if not isinstance(strategy, Strategy):
        raise InvalidValue(f"{text!r} reads as a {type(strategy).__name__}, not as a strategy")
    return strategy


def _read(node: ast.expr, known: Mapping[str, Callable[..., Any]], text: str) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            part = _known(name, known, text)
            if part is None or isinstance(part, torch.dtype) or _is_function(part):
                raise InvalidValue(f"{name} in {text!r} takes no arguments; write it without brackets")
            if any(word.arg is None for word in keywords) or any(isinstance(a, ast.Starred) for a in args):
                raise InvalidValue(f"* and ** are not read in {text!r}; write the arguments out")
            values = [_read(arg, known, text) for arg in args]
            named = {str(word.arg): _read(word.value, known, text) for word in keywords}
            try:
                return part(*values, **named)
            except TypeError as error:
                raise InvalidValue(f"{name} in {text!r}: {error}") from None
        case ast.Name(id=name):
            return _known(name, known, text)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in DTYPES:
            return DTYPES[name]
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, int | float):
            return -value
        case ast.List(elts=items):
            return [_read(item, known, text) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_read(item, known, text) for item in items)
        case ast.Dict(keys=keys, values=items) if None not in keys:
            pairs = zip(keys, items, strict=True)
            return {_read(key, known, text): _read(value, known, text) for key, value in pairs if key}
    raise InvalidValue(
        f"{ast.unparse(node)!r} in {text!r} is not read; use known names, numbers, strings, "
        "lists, tuples, dicts and dtypes"
    )


def _known(name: str, known: Mapping[str, Callable[..., Any]], text: str) -> Any:
    if name in DTYPES:
        return DTYPES[name]
    if name in known:
        return known[name]
    near = get_close_matches(name, [*known, *DTYPES], n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    raise InvalidValue(f"{name!r} in {text!r} is not known; {hint}")


def _is_function(part: object) -> bool:
    """An aggregate that is given as it is; others are classes, and are called with their options."""
    return not isinstance(part, type) and any(part is known for known in AGGREGATES.values())


def describe(value: object, *, shared_only: bool = False) -> str:
    """The text form: short, the same on every rank and in every process.

    ``parse(describe(strategy))`` is an equal strategy where all its options can be written down.
    ``shared_only`` leaves out what may differ between ranks, for comparing them.
    """
    if isinstance(value, Strategy):
        return _describe_part(value, shared_only)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        items = (f"{key!r}: {describe(inner, shared_only=shared_only)}" for key, inner in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(describe(item, shared_only=shared_only) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _describe_part(value, shared_only)
    if callable(value):  # its address would differ from process to process
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return str(name) if _is_function(value) else f"<{name}>"
    if type(value).__repr__ is object.__repr__:
        return f"<{type(value).__qualname__}>"
    return repr(value)


def _describe_part(part: object, shared_only: bool) -> str:
    shown: list[str] = []
    positional = True  # as long as nothing was left out and the field has no default
    for field, name, value in options(part):
        if is_stateful(value) and not isinstance(value, Strategy) and not dataclasses.is_dataclass(value):
            continue  # a memory or a ledger is no option; a Watch has some
        if shared_only and field is not None and field.metadata.get("per_rank"):
            positional = False
            continue
        required = field is not None and field.default is field.default_factory is dataclasses.MISSING
        if not required and field is not None and value == _default(field):
            positional = False
            continue
        text = describe(value, shared_only=shared_only)
        shown.append(text if positional and required else f"{name}={text}")
    return f"{type(part).__name__}({', '.join(shown)})"


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
