"""State in the wrong place: a strategy keeps it where nobody saves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from torch import Tensor

from ..errors import WrongState
from .strategy import Strategy, is_stateful, named_states, parts, public_fields, stateful_fields

OURS = "gradlane."
DEEPEST = 4  # levels of containers that are searched


def refuse_unsaved_state(strategy: Strategy) -> None:
    """Refuse a tensor in a plain attribute. It looks like an option: it would not be saved, nor undone with a
    step that fails, and would be compared as text."""
    for message in unsaved_state(strategy):
        raise WrongState(message)


def unsaved_state(strategy: Strategy) -> Iterator[str]:
    """One message for each state in the wrong place. A tensor under a name that begins with ``_`` passes: it
    is taken for something that can be computed again."""
    for part in parts(strategy):
        if type(part).__module__.startswith(OURS):
            continue
        saved = {id(state) for _, state in stateful_fields(part)}
        owner = type(part).__name__
        for name, value in _attributes(part).items():
            hidden = [inner for inner in _inside(value) if _is_state(inner) and id(inner) not in saved]
            if hidden:
                yield (
                    f"{owner}.{name} is a {type(hidden[0]).__name__} that nobody saves; make it a field of "
                    "the dataclass, under a public name, or an entry of a dict that is one"
                )
            elif not name.startswith("_") and (found := _array(value)) is not None:
                yield (
                    f"{owner}.{name} holds {found}, and a plain attribute is an option: it is not saved, and "
                    "not undone with a step that fails. State belongs in a gradlane.Memory (a field, "
                    "`memory: gl.Memory = field(default_factory=gl.Memory)`); what can be computed again "
                    f"belongs under a name like _{name}"
                )


def _attributes(part: Strategy) -> dict[str, object]:
    return {**{name: value for _, name, value in public_fields(part)}, **getattr(part, "__dict__", {})}


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def _is_state(value: object) -> bool:
    if isinstance(value, Strategy):
        return next(named_states(value), None) is not None
    return is_stateful(value) and not isinstance(value, type)


def _array(value: object, deep: int = DEEPEST) -> str | None:
    """The first tensor in a value, described."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        value = list(value.values())
    if deep and isinstance(value, list | tuple | set | frozenset):
        return next((found for inner in value if (found := _array(inner, deep - 1)) is not None), None)
    return None
