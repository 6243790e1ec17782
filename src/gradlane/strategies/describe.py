"""The text form of a strategy, for records, checkpoints and comparisons between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from ..aggregate.mean import mean
from ..core.strategy import Strategy, is_stateful, options

FUNCTIONS = (mean,)
"""Aggregates that are functions; all others are classes with options."""


def is_function(part: object) -> bool:
    return any(part is known for known in FUNCTIONS)


def describe(value: object, *, short: bool = False, shared_only: bool = False) -> str:
    """The text form with all its options, the same on every rank and in every process.

    ``parse(describe(strategy))`` is an equal strategy where all its options can be written down, also for a
    version whose defaults are others: so this is what checkpoints and records hold. ``short`` leaves out
    what is the default today, for tables and messages. ``shared_only`` leaves out what may differ between
    ranks, for comparing them.
    """

    def text_of(inner: object) -> str:
        return describe(inner, short=short, shared_only=shared_only)

    if isinstance(value, Strategy) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _describe_part(value, short, shared_only, text_of)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {text_of(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(text_of, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if callable(value):  # its address would differ from process to process
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return str(name) if is_function(value) else f"<{name}>"
    if type(value).__repr__ is object.__repr__:
        return f"<{type(value).__qualname__}>"
    return repr(value)


def _tensor(value: Tensor) -> str:
    """Type, shape and digest, the same for equal tensors: the table of a codec, say. As an attribute of a
    strategy ``attach`` refuses a tensor (core/unsaved_state.py)."""
    kind = f"tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.device.type == "meta" or value.is_sparse:
        return f"<{kind}>"
    plain = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return f"<{kind} {blake2b(plain.numpy().tobytes(), digest_size=4).hexdigest()}>"


def _describe_part(part: object, short: bool, shared_only: bool, text_of: Callable[[object], str]) -> str:
    shown: list[str] = []
    positional = True  # as long as nothing was left out and the field has no default
    for field, name, value in options(part):
        if is_stateful(value) and not isinstance(value, Strategy) and not dataclasses.is_dataclass(value):
            continue  # a memory or a ledger is state; a Watch has options
        if shared_only and field is not None and field.metadata.get("per_rank"):
            positional = False
            continue
        required = field is not None and field.default is field.default_factory is dataclasses.MISSING
        if short and not required and field is not None and value == _default(field):
            positional = False
            continue
        shown.append(text_of(value) if positional and required else f"{name}={text_of(value)}")
    return f"{type(part).__name__}({', '.join(shown)})"


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
