"""Who is heard in a step, and with what weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import InvalidValue
from .combine import Aggregate, combine_into
from .distances import squared_distances
from .mixture import Mixture, Room
from .rule import GramRule, Rule

LEAST_SCALE = 1e-6  # of the norms: ranks that are closer than that are the same


@dataclass(frozen=True, eq=False)
class Verdict:
    """What all ranks decide alike, because they look at the same figures."""

    heard: tuple[int, ...]
    broken: tuple[int, ...]
    """They sent something that is not finite, and are left out."""
    gram: Tensor
    """Inner products of those that are heard."""
    rule: Rule | Aggregate
    """For those that are heard."""

    @cached_property
    def mixture(self) -> Mixture | None:
        """Of a rule for whole vectors."""
        return self.rule.mixture(self.gram) if isinstance(self.rule, GramRule) and self.heard else None

    def answer(self, rows: Tensor, out: Tensor, room: Room) -> None:
        """One row of all ranks' rows, or of a part of each, into ``out``. Where nobody sent finite values it
        is not finite. ``room`` gives memory to work in."""
        if not self.heard:
            out.fill_(torch.nan)
            return
        if len(self.heard) < len(rows):
            rows = rows[list(self.heard)]
        if self.mixture is not None:
            self.mixture.write(rows, out, room)
        else:
            combine_into(self.rule, rows, out)  # type: ignore[arg-type]  # a rule that is no GramRule

    @cached_property
    def distances(self) -> Tensor:
        """Of each rank that is heard, the median distance to the others; the lower one of two."""
        count = len(self.heard)
        if count < 2:
            return self.gram.new_zeros(count)
        return squared_distances(self.gram).sort(dim=1).values[:, 1 + (count - 2) // 2].sqrt()

    @cached_property
    def times_as_far(self) -> Tensor:
        """The same in parts of what is usual."""
        if not self.heard:
            return self.distances
        usual = self.distances.median()
        return self.distances / torch.maximum(usual, LEAST_SCALE * self.norms.median()).clamp(min=1e-300)

    @cached_property
    def norms(self) -> Tensor:
        return self.gram.diagonal().sqrt()

    def figures(self) -> dict[str, float]:
        """For the metrics: how far each rank is, what it counts for, and whether it was left out."""
        told = {f"rank{rank}_excluded": 1.0 for rank in self.broken}
        for rank, distance in zip(self.heard, self.distances.tolist(), strict=True):
            told[f"rank{rank}_distance_square"] = distance**2
        if self.mixture is not None:
            shares = self.mixture.weights.mean(0).tolist()
            told |= {f"rank{rank}_weight": share for rank, share in zip(self.heard, shares, strict=True)}
        return told


def judged(rule: Rule | Aggregate, seen: Tensor, step: int) -> Verdict:
    """Decide by ``seen``, fp64 [ranks, ranks + 1]: inner products, and a number above 0 for one who has
    joined.

    A rank that is not finite has an inner product with itself that is not: squares of fp32 never leave
    fp64. It is left out and counts as one of the wrong ranks that the rule may meet; one that has joined is
    left out and does not.
    """
    ranks = len(seen)
    joined = seen[:, ranks] > 0
    finite = seen[:, :ranks].diagonal().isfinite()
    heard = (finite & ~joined).nonzero().view(-1)
    broken = (~finite & ~joined).nonzero().view(-1).tolist()
    if isinstance(rule, Rule) and len(heard) < ranks and len(heard):
        rule = rule.without(len(broken))
        _check_rest(rule, len(heard), ranks, broken, joined.nonzero().view(-1).tolist(), step)
    gram = seen[:, :ranks][heard][:, heard]
    return Verdict(tuple(heard.tolist()), tuple(broken), gram, rule)


def alone(seen: Tensor) -> Verdict:
    """With one rank only there is nothing to decide."""
    return Verdict((0,), (), seen[:, :1], _first)


def _first(rows: Tensor) -> Tensor:
    return rows[0]


def _check_rest(rule: Rule, left: int, ranks: int, broken: list[int], joined: list[int], step: int) -> None:
    try:
        rule.check(left)
    except InvalidValue as error:
        told = [f"{_named(broken)} sent values that are not finite"] if broken else []
        told += [f"{_named(joined)} ran out of data"] if joined else []
        raise InvalidValue(
            f"step {step}: {' and '.join(told)}; {left} of {ranks} ranks are left, which is too few: {error}"
        ) from None


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
