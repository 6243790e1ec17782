"""What an aggregate is, and the checks of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InvalidValue, WrongType
from .rule import GramRule, Rule, WritingRule

Aggregate = Callable[[Tensor], Tensor]
"""From fp32 rows [world, n], where row r is what rank r sent, to [n] in the same order of elements. The same
rows must give the same bits on every rank. It may overwrite the rows. A joined rank is a row of zeros."""


def check_rule(aggregate: object, ranks: int) -> None:
    """Refuse a number of ranks that is too small for a rule. A single rank gets its own gradient."""
    if isinstance(aggregate, Rule) and ranks > 1:
        aggregate.check(ranks)


def combine_into(aggregate: Aggregate, rows: Tensor, out: Tensor) -> None:
    """Write what the aggregate makes of the rows into ``out``."""
    if isinstance(aggregate, WritingRule) and out.dtype == torch.float32:
        aggregate.write(rows, out)
    else:
        out.copy_(combined(aggregate, rows))


def combined(aggregate: Aggregate, rows: Tensor) -> Tensor:
    """The same as a new tensor, checked: the aggregate may be a user's function."""
    world, count = rows.shape
    found: object = aggregate(rows)
    wanted = f"return float32[{count}] on {rows.device}, a number for each column"
    if not isinstance(found, Tensor):
        raise WrongType(f"the aggregate {_name(aggregate)} returned {type(found).__name__}; {wanted}")
    if found.shape != rows.shape[1:] or found.dtype != torch.float32 or found.device != rows.device:
        got = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)} on {found.device}"
        raise InvalidValue(
            f"the aggregate {_name(aggregate)} made {got} of float32[{world}, {count}]; {wanted}"
        )
    return found


def check_aggregate(aggregate: object, strategy: str) -> None:
    """Refuse what cannot be called, and a class where an instance is meant."""
    if isinstance(aggregate, type):
        name = aggregate.__name__
        raise WrongType(f"{strategy} got the class {name}; write {name}(), with brackets")
    if isinstance(aggregate, GramRule):
        raise WrongType(
            f"{strategy} decides shard by shard, and {type(aggregate).__name__} is about the whole gradient; "
            f"write Combined({aggregate!r})"
        )
    if not callable(aggregate):
        raise WrongType(
            f"{strategy} aggregate={aggregate!r} cannot be called; use a function from [world, n] to [n], or "
            "leave it out for the mean"
        )


def _name(aggregate: Aggregate) -> str:
    return str(getattr(aggregate, "__qualname__", type(aggregate).__qualname__))
