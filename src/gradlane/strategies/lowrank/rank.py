"""The options that PowerSGD and AcpSGD share, above all the rank: their meaning, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch

from ...core.numbers import is_number, is_whole
from ...errors import InvalidValue, WrongType

Rank = int | Mapping[str, int] | Callable[[str, torch.Size], int]
"""One rank for all matrices, ranks by name pattern, or a function of name and shape."""
View = Literal["tensor", "bucket"]
VIEWS = ("tensor", "bucket")


def rank_of(rank: Rank, name: str, shape: torch.Size) -> int:
    """The rank that this tensor shall have; 0 for one that travels dense."""
    if isinstance(rank, int):
        return rank
    if isinstance(rank, Mapping):
        return next((r for pattern, r in rank.items() if fnmatchcase(name, pattern)), 0)
    found = rank(name, shape)
    if not is_whole(found) or found < 0:
        raise InvalidValue(f"the rule for ranks gave {found!r} for {name!r}; return a whole number from 0 up")
    return found


def check_options(strategy: str, rank: object, min_compression_rate: float, view: str, seed: int) -> None:
    _check_rank(strategy, rank)
    check_whole(strategy, "seed", seed, least=0)
    if not is_number(min_compression_rate) or not 0 <= min_compression_rate < math.inf:
        raise InvalidValue(
            f"{strategy} min_compression_rate={min_compression_rate!r}; use a number from 0 up"
        )
    if view not in VIEWS:
        raise InvalidValue(f"{strategy} view={view!r}; use one of {', '.join(VIEWS)}")


def check_whole(strategy: str, name: str, value: object, least: int) -> None:
    if not is_whole(value) or value < least:
        raise InvalidValue(f"{strategy} {name}={value!r}; use a whole number from {least} up")


def _check_rank(strategy: str, rank: object) -> None:
    if isinstance(rank, Mapping):
        for pattern, r in rank.items():
            if not isinstance(pattern, str):
                raise WrongType(f"{strategy} rank has the key {pattern!r}; use name patterns such as 'fc*'")
            check_whole(strategy, f"rank[{pattern!r}]", r, least=0)
    elif is_whole(rank):
        check_whole(strategy, "rank", rank, least=1)
    elif not callable(rank):
        raise WrongType(
            f"{strategy} rank={rank!r}; use a whole number, a dict of name patterns to numbers, or a "
            "function of name and shape"
        )
