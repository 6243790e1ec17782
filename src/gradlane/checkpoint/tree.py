"""A state as a list of entries, each a path and a value. Values are tensors, numbers and strings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..errors import InvalidValue, WrongType

Path = tuple[str, ...]
EMPTY: dict[str, Any] = {}


def entries_of(state: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value with its path. An empty mapping is a value too, so that it is restored."""
    for key, value in state.items():
        if not isinstance(key, str):
            raise WrongType(f"the state has the key {key!r} in {_shown(path)}; keys are strings")
        here = (*path, key)
        if isinstance(value, Mapping) and value:
            yield from entries_of(value, here)
        elif isinstance(value, Mapping):
            yield here, EMPTY
        elif isinstance(value, Tensor | bool | int | float | str):
            yield here, value
        else:
            raise WrongType(
                f"the state has a {type(value).__name__} in {_shown(here)}; a checkpoint holds tensors, "
                "numbers and strings, in dicts"
            )


def tree_of(entries: Iterable[tuple[Path, object]]) -> dict[str, Any]:
    """The state of these entries; refuses entries whose paths collide."""
    tree: dict[str, Any] = {}
    for path, value in entries:
        *above, last = path
        node = tree
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise InvalidValue(f"the entry {_shown(path)} is inside another value")
        if last in node:
            raise InvalidValue(f"the entry {_shown(path)} is there twice")
        node[last] = {} if isinstance(value, Mapping) and value == EMPTY else value
    return tree


def part_at(tree: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The part at a path; empty if there is none."""
    found: object = tree
    for key in path:
        found = found.get(key, {}) if isinstance(found, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def with_part(tree: dict[str, Any], path: Path, part: Mapping[str, Any]) -> None:
    """Put a part at a path; an empty one is left out, as ``Strategy.state_dict`` does."""
    *above, last = path
    if not part:
        return
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = part


def _shown(path: Path) -> str:
    return repr("/".join(path)) if path else "its top"
