"""What to write instead, for texts and objects that are not strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ..aggregate.rule import Rule
from ..codecs.base import Codec
from .describe import describe, is_function

PYTHON_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}
NARROW_NUMBERS = ("int", "uint", "float8", "float4", "fp8", "qint")  # how their dtypes begin
SHORT_NAMES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def instead_of(part: object) -> str | None:
    """The strategy that a codec, a rule or an aggregate belongs into; None for anything else."""
    name = part.__name__ if isinstance(part, type) else type(part).__name__
    made = name + "()" if isinstance(part, type) else describe(part, short=True)
    kind = part if isinstance(part, type) else type(part)
    if issubclass(kind, Codec):
        return f"{name} is a codec: how one rank's numbers travel. Write Sharded({made}), say"
    if issubclass(kind, Rule):
        return f"{name} is a rule: how the ranks' numbers are combined. Write Combined({made}), say"
    if is_function(part) and inspect.isfunction(part):
        return f"{part.__name__} is an aggregate. Write Sharded(Raw(), aggregate={part.__name__}), say"
    return None


def instead_of_name(name: str, parts: Mapping[str, object], dtypes: Iterable[str]) -> str:
    """The end of a message about a name that nobody knows."""
    names = sorted([*parts, *dtypes], reverse=True)  # Mean after mean: of both, the class is meant
    lower = {known.lower(): known for known in names}
    if name.lower() in PYTHON_WORDS:
        return f"write {PYTHON_WORDS[name.lower()]}"
    if name.lower() in SHORT_NAMES:
        return f"did you mean {SHORT_NAMES[name.lower()]}, as in Cast(Mean(), {SHORT_NAMES[name.lower()]})?"
    if name.startswith(NARROW_NUMBERS) and name not in lower:
        return f"such numbers cannot be summed; use {', '.join(dtypes)}, or a codec: Sharded(Int8())"
    near = get_close_matches(name.lower(), lower, n=1)
    if near:
        found = lower[near[0]]
        return f"did you mean {found}?" if (hint := instead_of(parts.get(found))) is None else hint
    return "`gradlane strategies` lists all names"


def objection_to_arguments(
    part: Callable[..., Any], name: str, values: Iterable[object], named: Iterable[str]
) -> str | None:
    """What is wrong with the number of arguments, or with their names; None if they fit."""
    options = [option for option in inspect.signature(part).parameters.values() if option.name != "self"]
    known = [option.name for option in options]
    count = len(list(values))
    if count > len(known):
        return f"{name} takes {len(known) or 'no'} arguments, got {count}"
    for word in named:
        if word not in known:
            near = get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}=?" if near else f"it has {', '.join(known) or 'none'}"
            return f"{name} has no option {word}; {hint}"
        if word in known[:count]:
            return f"{name} has {word} twice, once by its place; say it once"
    given = {*known[:count], *named}
    missing = [
        option.name for option in options if option.default is option.empty and option.name not in given
    ]
    return f"{name} needs {' and '.join(missing)}" if missing else None
