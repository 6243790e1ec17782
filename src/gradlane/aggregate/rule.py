"""What a robust rule is: it makes one row of all ranks' rows, of which a limited number may be wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..core.numbers import is_whole
from ..errors import InvalidValue, WrongType

if TYPE_CHECKING:
    from .mixture import Mixture


class Rule(ABC):
    """Make it a frozen dataclass of options: no state, comparable, with a text form."""

    wrong: ClassVar[str | None] = None
    """The name of the option that says how many ranks may be wrong, if there is one."""

    @abstractmethod
    def check(self, ranks: int) -> None:
        """Refuse a number of ranks that is too small for the options."""

    def without(self, excluded: int) -> Rule:
        """The rule for the remaining ranks, after so many wrong ranks were found and left out."""
        if self.wrong is None:
            return self
        changed: dict[str, Any] = {self.wrong: max(0, getattr(self, self.wrong) - excluded)}
        return replace(self, **changed)  # type: ignore[type-var]  # a dataclass


class RowRule(Rule):
    """A rule for each element by itself, which needs no more than a shard of each rank.

    It is an aggregate as well: ``Sharded(Raw(), Median())``. The rows must be finite. ``Combined`` leaves
    out non-finite ranks; ``Sharded`` and ``Gathered`` answer NaN for an element that is NaN on any rank.
    """

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """From finite fp32 rows [ranks, n] to [n]."""


class WritingRule(RowRule):
    """A rule for elements that writes its answer into a given tensor, and allocates nothing."""

    def __call__(self, rows: Tensor) -> Tensor:
        out = rows.new_empty(rows.shape[1])
        self.write(rows, out)
        return out

    @abstractmethod
    def write(self, rows: Tensor, out: Tensor) -> None:
        """From finite fp32 rows [ranks, n] into fp32 ``out`` [n]."""


class GramRule(Rule):
    """A rule about gradients as vectors: it needs only their Gram matrix."""

    @abstractmethod
    def mixture(self, gram: Tensor) -> Mixture:
        """From the finite fp64 [ranks, ranks] of inner products to the coefficients."""


def check_count(rule: object, name: str, least: int = 0) -> None:
    """Refuse an option that is not a whole number, or below its least value."""
    value = getattr(rule, name)
    if not is_whole(value):
        raise WrongType(f"{_name(rule)} {name} is a {type(value).__name__}; give a whole number")
    if value < least:
        raise InvalidValue(f"{_name(rule)} {name}={value} is not possible; use {least} or more")


def check_minority(rule: object, f: int, ranks: int) -> None:
    """Refuse wrong ranks that may be half of all: no rule can tell them from right ones."""
    if 2 * f >= ranks:
        raise InvalidValue(
            f"{_name(rule)} f={f} is not a minority of {ranks} ranks; use f < {-(-ranks // 2)}, or at least "
            f"{2 * f + 1} ranks"
        )


def check_at_least(rule: object, f: int, ranks: int, least: int, most_f: int) -> None:
    if ranks < least:
        way_out = f"f={most_f} at most, or " if most_f >= 0 else ""
        raise InvalidValue(
            f"{_name(rule)} f={f} needs {least} ranks, and there are {ranks}; use {way_out}another rule"
        )


def _name(rule: object) -> str:
    return type(rule).__name__
