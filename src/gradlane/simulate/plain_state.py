"""What is in a saved state, and in what two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .after import same_bits


def unsavable(state: Mapping[Any, Any], path: str = "") -> str | None:
    """A message about the first value that no checkpoint can hold, or None."""
    for key, value in state.items():
        here = f"{path}/{key}".strip("/")
        if not isinstance(key, str):
            return f"the state has the key {key!r} in {path or 'its top'!r}; keys are strings"
        if isinstance(value, Mapping):
            if (message := unsavable(value, here)) is not None:
                return message
        elif not isinstance(value, Tensor | bool | int | float | str):
            return (
                f"the state has a {type(value).__name__} in {here!r}; a checkpoint holds tensors, numbers "
                "and strings, in dicts"
            )
    return None


def part_of(state: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    found: Any = state
    for key in path:
        found = found.get(key, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def without_zeros(state: object) -> object:
    """The state without tensors of zeros: a memory of zeros is the same as no memory."""
    if isinstance(state, Tensor):
        return state if state.count_nonzero() else None
    if not isinstance(state, Mapping):
        return state
    inside = {key: without_zeros(value) for key, value in state.items()}
    return {key: value for key, value in inside.items() if value is not None} or None


def difference(one: object, two: object) -> str | None:
    """The first key at which two states differ, or None."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in dict.fromkeys((*one, *two)):
            if difference(one.get(key), two.get(key)) is not None:
                return str(key)
        return None
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return None if same_bits(one, two) else "a tensor"
    return None if type(one) is type(two) and one == two else "a value"
