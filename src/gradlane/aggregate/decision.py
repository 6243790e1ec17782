"""Which ranks count in a step, and with what weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..core.streams import on_device
from ..errors import InvalidValue
from .combine import Aggregate, combine_into
from .distances import squared_distances
from .mixture import Buffer, Mixture
from .rule import GramRule, Rule

LEAST_SCALE = 1e-6  # of the norms: ranks that are closer than that are the same


@dataclass(frozen=True, eq=False)
class Decision:
    """All ranks decide the same, because they have the same figures."""

    included: tuple[int, ...]
    nonfinite: tuple[int, ...]
    """Ranks that are left out because they sent non-finite values."""
    gram: Tensor
    """Inner products of the included ranks."""
    rule: Rule | Aggregate
    """For the included ranks."""

    @cached_property
    def mixture(self) -> Mixture | None:
        """Of a rule for whole vectors."""
        return self.rule.mixture(self.gram) if isinstance(self.rule, GramRule) and self.included else None

    def combine(self, rows: Tensor, out: Tensor, buffer: Buffer) -> None:
        """Combine all ranks' rows, or the same columns of each, into ``out``; NaN where nobody sent finite
        values. ``buffer`` gives memory to work in."""
        if not self.included:
            out.fill_(torch.nan)
            return
        if len(self.included) < len(rows):
            rows = rows[on_device(torch.tensor(self.included), rows.device)]
        if self.mixture is not None:
            self.mixture.write(rows, out, buffer)
        else:
            combine_into(self.rule, rows, out)  # type: ignore[arg-type]  # not a GramRule

    @cached_property
    def distances(self) -> Tensor:
        """Of each included rank, the median distance to the others; the lower one of two."""
        count = len(self.included)
        if count < 2:
            return self.gram.new_zeros(count)
        return squared_distances(self.gram).sort(dim=1).values[:, 1 + (count - 2) // 2].sqrt()

    @cached_property
    def times_as_far(self) -> Tensor:
        """The same as multiples of the median over the ranks."""
        if not self.included:
            return self.distances
        usual = self.distances.median()
        return self.distances / torch.maximum(usual, LEAST_SCALE * self.norms.median()).clamp(min=1e-300)

    @cached_property
    def norms(self) -> Tensor:
        return self.gram.diagonal().sqrt()

    def figures(self) -> dict[str, float]:
        """For the metrics: how far each rank is, what it counts for, and whether it was left out."""
        figures = {f"rank{rank}_excluded": 1.0 for rank in self.nonfinite}
        for rank, distance in zip(self.included, self.distances.tolist(), strict=True):
            figures[f"rank{rank}_distance_square"] = distance**2
        if self.mixture is not None:
            shares = self.mixture.weights.mean(0).tolist()
            figures |= {
                f"rank{rank}_weight": share for rank, share in zip(self.included, shares, strict=True)
            }
        return figures


def decide(rule: Rule | Aggregate, seen: Tensor, step: int) -> Decision:
    """Decide by ``seen``, fp64 [ranks, ranks + 1]: inner products, and a number above 0 for a joined rank.

    A rank with non-finite values has a non-finite inner product with itself; finite ones never do, because
    squares of fp32 fit into fp64. Such a rank is left out and counts as one of the wrong ranks that the rule
    expects. A joined rank is left out and does not count.
    """
    ranks = len(seen)
    joined = seen[:, ranks] > 0
    finite = seen[:, :ranks].diagonal().isfinite()
    included = (finite & ~joined).nonzero().view(-1)
    nonfinite = (~finite & ~joined).nonzero().view(-1).tolist()
    if isinstance(rule, Rule) and len(included) < ranks and len(included):
        rule = rule.without(len(nonfinite))
        _check_remaining(rule, len(included), ranks, nonfinite, joined.nonzero().view(-1).tolist(), step)
    gram = seen[:, :ranks][included][:, included]
    return Decision(tuple(included.tolist()), tuple(nonfinite), gram, rule)


def decide_alone(seen: Tensor) -> Decision:
    """With one rank only there is nothing to decide."""
    return Decision((0,), (), seen[:, :1], _first)


def _first(rows: Tensor) -> Tensor:
    return rows[0]


def _check_remaining(
    rule: Rule, remaining: int, ranks: int, nonfinite: list[int], joined: list[int], step: int
) -> None:
    try:
        rule.check(remaining)
    except InvalidValue as error:
        reasons = [f"{_named(nonfinite)} sent values that are not finite"] if nonfinite else []
        reasons += [f"{_named(joined)} ran out of data"] if joined else []
        raise InvalidValue(
            f"step {step}: {' and '.join(reasons)}; {remaining} of {ranks} ranks are left, which is too few: "
            f"{error}"
        ) from None


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
