"""Distances between gradients, and to combinations of them, from inner products alone."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distances(gram: Tensor) -> Tensor:
    """|g_i - g_j|^2 = <g_i, g_i> + <g_j, g_j> - 2 <g_i, g_j>.

    What cancels is exact to 1e-16 of the squared norms, so distances are known where gradients agree in all
    but the seventh digit, which is all that fp32 has.
    """
    norms = gram.diagonal()
    square = norms[:, None] + norms[None, :] - 2 * gram
    return square.clamp_(min=0).fill_diagonal_(0)


def nearest(squares: Tensor, count: int) -> Tensor:
    """For each, the ``count`` that are nearest to it, itself first; of equals the one of lower rank."""
    mine = squares.clone().fill_diagonal_(-1)
    return torch.argsort(mine, dim=1, stable=True)[:, :count]


class Majority:
    """The n // 2 + 1 gradients that are nearest to the medoid, which has the smallest sum of distances to
    all.

    No minority moves them far: where an iteration begins, and what it measures lengths by.
    """

    def __init__(self, gram: Tensor) -> None:
        squares, ranks = squared_distances(gram), len(gram)
        self.medoid = int(squares.sqrt().sum(1).argmin())
        self.members = nearest(squares, ranks // 2 + 1)[self.medoid]
        self.radius = float(squares[self.medoid, self.members].max().sqrt())
        # With the medoid as the origin what all have in common is gone. From inner products, not from
        # distances: those of gradients far away would drown the others.
        across = gram[self.medoid]
        self._gram = gram - across[:, None] - across[None, :] + across[self.medoid]

    def mean(self) -> Tensor:
        """Its mean, as weights of all ranks."""
        weights = self._gram.new_zeros(len(self._gram))
        weights[self.members] = 1 / len(self.members)
        return weights

    def distances_to(self, weights: Tensor) -> Tensor:
        """|g_i - sum_j w_j g_j| for each i and weights that add up to 1."""
        products = self._gram @ weights
        square = self._gram.diagonal() - 2 * products + products.dot(weights)
        return square.clamp_(min=0).sqrt_()
