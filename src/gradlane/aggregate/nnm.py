"""Nearest-neighbour mixing before any rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WrongType
from .distances import nearest, squared_distances
from .mixture import Mixture
from .rule import GramRule, RowRule, Rule, check_count, check_minority


@dataclass(frozen=True)
class NNM(GramRule):
    """Replace every gradient by the mean of the n - f nearest to it, itself included; then apply another
    rule.

    Allouah et al., 2023, "Fixing by mixing: a recipe for optimal Byzantine ML under heterogeneity":
    whatever robust rule follows, the error is of the smallest possible order. Needs n > 2 f, and what the
    other rule needs; tolerates f wrong ranks, or as many as the other rule if that is fewer.
    """

    f: int
    then: Rule
    wrong = "f"

    def __post_init__(self) -> None:
        check_count(self, "f")
        if not isinstance(self.then, RowRule | GramRule):
            got = self.then.__name__ if isinstance(self.then, type) else type(self.then).__name__
            raise WrongType(f"NNM then={got} is not a rule; write NNM({self.f}, then=TrimmedMean({self.f}))")

    def check(self, ranks: int) -> None:
        check_minority(self, self.f, ranks)
        self.then.check(ranks)

    def without(self, excluded: int) -> Rule:
        return NNM(max(0, self.f - excluded), self.then.without(excluded))

    def mixture(self, gram: Tensor) -> Mixture:
        ranks, kept = len(gram), len(gram) - self.f
        mixing = torch.zeros_like(gram)
        mixing.scatter_(1, nearest(squared_distances(gram), kept), 1 / kept)
        if isinstance(self.then, RowRule):
            return Mixture(mixing, self.then if ranks > 1 else None)
        assert isinstance(self.then, GramRule)
        follows = self.then.mixture(mixing @ gram @ mixing.t())
        return Mixture(follows.weights @ mixing, follows.then)
