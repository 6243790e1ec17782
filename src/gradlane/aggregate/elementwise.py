"""Rules for each element by itself: a mean of values in the middle of the ranks' values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import InvalidValue
from ..kernels.rows import mean_near_middle, mean_of_sorted
from .rule import WritingRule, check_count


@dataclass(frozen=True)
class Median(WritingRule):
    """The middle value of each element; with an even number of ranks the mean of the two in the middle.

    Yin et al., 2018, "Byzantine-robust distributed learning: towards optimal statistical rates". A minority
    of wrong ranks, of any size, cannot leave the range of the others: breakdown point 1/2.
    """

    def check(self, ranks: int) -> None:
        """Any number of ranks has a median."""

    def write(self, rows: Tensor, out: Tensor) -> None:
        ranks = len(rows)
        mean_of_sorted(rows, (ranks - 1) // 2, ranks // 2 + 1, out)


@dataclass(frozen=True)
class TrimmedMean(WritingRule):
    """The mean of each element without the ``trim`` largest and the ``trim`` smallest values.

    Yin et al., 2018, as ``Median``. Up to ``trim`` wrong ranks cannot leave the range of the others;
    breakdown point trim / n. Needs n > 2 trim.
    """

    trim: int
    wrong = "trim"

    def __post_init__(self) -> None:
        check_count(self, "trim")

    def check(self, ranks: int) -> None:
        if 2 * self.trim >= ranks:
            raise InvalidValue(
                f"trim={self.trim} leaves nothing of {ranks} ranks; use trim < {-(-ranks // 2)}"
            )

    def write(self, rows: Tensor, out: Tensor) -> None:
        self.check(len(rows))
        mean_of_sorted(rows, self.trim, len(rows) - self.trim, out)


@dataclass(frozen=True)
class NearMedian(WritingRule):
    """For each element the mean of the ``keep`` values nearest to the median: Bulyan's second half."""

    keep: int

    def __post_init__(self) -> None:
        check_count(self, "keep", least=1)

    def check(self, ranks: int) -> None:
        if self.keep > ranks:
            raise InvalidValue(f"keep={self.keep} is more than {ranks} ranks; use {ranks} or less")

    def write(self, rows: Tensor, out: Tensor) -> None:
        self.check(len(rows))
        mean_near_middle(rows, self.keep, out)
