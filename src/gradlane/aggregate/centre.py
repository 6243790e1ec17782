"""Rules that find the centre of the gradients by iteration, with weights on the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.numbers import is_number
from ..errors import InvalidValue, WrongType
from .distances import Majority
from .mixture import Mixture
from .rule import GramRule, check_count

CONVERGED = 1e-12  # stop when the weights change by less


@dataclass(frozen=True)
class GeometricMedian(GramRule):
    """The point with the smallest sum of distances to all gradients, by the smoothed Weiszfeld algorithm:
    weights ``w_i = 1 / max(|g_i - z|, smoothing)``, divided by their sum, and z the weighted mean, repeated.

    Pillutla et al., 2022, "Robust aggregation for federated learning" (RFA). Breakdown point 1/2.
    ``smoothing`` is a fraction of the radius of the closest majority. It starts at the mean of the majority
    that is closest together, not at the mean of all, which wrong ranks could move so far that many iterations
    were needed to come back.
    """

    iterations: int = 100
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        check_count(self, "iterations", least=1)
        if not is_number(self.smoothing) or not 0 < self.smoothing < math.inf:
            raise InvalidValue(f"smoothing={self.smoothing!r} is not possible; use a positive number")

    def check(self, ranks: int) -> None:
        """Any number of ranks."""

    def mixture(self, gram: Tensor) -> Mixture:
        majority = Majority(gram)
        weights, least = majority.mean(), self.smoothing * majority.radius
        if least == 0:  # more than half are the same
            return Mixture(weights.view(1, -1))
        for _ in range(self.iterations):
            before = weights
            nearness = 1 / majority.distances_to(weights).clamp(min=least)
            weights = nearness / nearness.sum()
            if float((weights - before).abs().max()) < CONVERGED:
                break
        return Mixture(weights.view(1, -1))


@dataclass(frozen=True)
class CenteredClipping(GramRule):
    """``v + mean_i (g_i - v) min(1, tau / |g_i - v|)``, ``iterations`` times: in each nobody moves the centre
    by more than tau / n.

    Karimireddy et al., 2021, "Learning from history for Byzantine robust optimization". ``tau`` is a
    length, in the gradient's own units; without it, the median distance from the centre in each iteration.
    The paper's centre is the answer of the step before, which would be one more gradient to keep; here it
    is the mean of the majority that is closest together in this step. Breakdown point 1/2 for the centre;
    the paper's guarantee is for f / n up to 1/10.
    """

    tau: float | None = None
    iterations: int = 3

    def __post_init__(self) -> None:
        check_count(self, "iterations", least=1)
        if self.tau is None:
            return
        if not is_number(self.tau):
            raise WrongType(f"tau is a {type(self.tau).__name__}; give a length, or leave it out")
        if not 0 < self.tau < math.inf:
            raise InvalidValue(f"tau={self.tau} is not possible; use a positive number, or leave it out")

    def check(self, ranks: int) -> None:
        """Any number of ranks."""

    def mixture(self, gram: Tensor) -> Mixture:
        majority = Majority(gram)
        centre = majority.mean()
        for _ in range(self.iterations):
            away = majority.distances_to(centre)
            tau = float(away.median()) if self.tau is None else self.tau
            pull = torch.where(away > tau, tau / away, 1.0)
            centre = centre * (1 - pull.mean()) + pull / len(pull)
        return Mixture(centre.view(1, -1))
