"""A trial: two strategies in turn, in real steps, until it is clear which one is faster."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

TIMED = 3  # steps of a block whose median counts
ROUNDS = 12  # of four blocks, at most
ENOUGH = 4  # rounds for a small gain
GAIN = math.log(0.98)  # what must be gained, at the least
HOPELESS = 1.25  # a first step this much slower ends the trial
CLEAR = {2: math.log(0.83), 4: math.log(0.90)}
"""By number of pairs: if all of them are below this nothing more needs to be measured."""
STUDENT = {8: 2.998, 10: 2.821, 12: 2.718, 14: 2.650, 16: 2.602, 18: 2.567, 20: 2.539, 22: 2.518, 24: 2.500}
"""By number of pairs: the one-sided quantile of 99 % of Student's distribution."""


class Block(NamedTuple):
    """Steps with one strategy; the answer to it is the median of their seconds, the largest of all ranks."""

    strategy: str
    timed: int = TIMED
    why: str = ""
    decided: bool = False
    """Whether it is a decision to log, not a part of a trial."""


Blocks = Generator[Block, float, None]


@dataclass
class Account:
    """What trials have cost so far."""

    seconds: float = 0.0
    """Of all timed steps."""
    lost: float = 0.0
    """In steps with the slower one of two strategies."""
    steps: int = 0

    def add(self, seconds: float, steps: int) -> None:
        self.seconds += seconds * steps
        self.steps += steps

    @property
    def allows_another(self) -> bool:
        return self.lost <= 0.01 * self.seconds


@dataclass(frozen=True)
class Outcome:
    faster: bool
    ratio: float
    """Seconds of the new strategy over those of the old one."""
    seconds: float
    """Of a step with the faster one."""
    pairs: int


def trial(old: str, new: str, account: Account) -> Generator[Block, float, Outcome]:
    """Blocks in the order old, new, new, old: then a steady drift of the machine favours neither.

    ``new`` is adopted if it is clearly faster by 2 % at least: the upper bound of the mean ratio of pairs, at
    99 %, must be below 0.98.
    """
    why = f"trial of {new} against {old}"
    ratios: list[float] = []
    olds: list[float] = []
    news: list[float] = []

    def block(strategy: str, found: list[float], timed: int = TIMED) -> Generator[Block, float, float]:
        seconds = yield Block(strategy, timed, why)
        account.add(seconds, timed + 1)
        found.append(seconds)
        return seconds

    for _ in range(ROUNDS):
        before = yield from block(old, olds)
        if not news:  # one step is enough to see that it is hopeless
            first = yield from block(new, [], timed=1)
            account.lost += max(0.0, first - before) * 3
            if first > HOPELESS * before:
                return Outcome(False, first / before, before, 1)
        first = yield from block(new, news)
        account.lost += max(0.0, first - before) * (TIMED + 1)
        second = yield from block(new, news)
        after = yield from block(old, olds)
        account.lost += max(0.0, second - after) * (TIMED + 1)
        ratios += [math.log(first / before), math.log(second / after)]
        if (faster := verdict(ratios)) is not None:
            break
    ratio = math.exp(fmean(ratios))
    return Outcome(bool(faster), ratio, fmean(news if faster else olds), len(ratios))


def verdict(ratios: Sequence[float]) -> bool | None:
    """Whether the new strategy is faster, from the logarithms of the ratios; None if it is not clear yet."""
    mean, pairs = fmean(ratios), len(ratios)
    if mean > GAIN:
        return False
    if pairs in CLEAR and max(ratios) < CLEAR[pairs]:
        return True
    if pairs in STUDENT and mean + STUDENT[pairs] * stdev(ratios) / math.sqrt(pairs) < GAIN:
        return True
    return None
