"""Distances between gradients, and to combinations of them, from inner products alone."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distances(gram: Tensor) -> Tensor:
    """|g_i - g_j|^2 = <g_i, g_i> + <g_j, g_j> - 2 <g_i, g_j>.

    The cancellation leaves an error of 1e-16 of the squared norms, so even the distance of gradients that
    differ only in the seventh digit, the last one of fp32, is known.
    """
    norms = gram.diagonal()
    square = norms[:, None] + norms[None, :] - 2 * gram
    return square.clamp_(min=0).fill_diagonal_(0)


def nearest(squares: Tensor, count: int) -> Tensor:
    """For each gradient the ``count`` nearest ones, itself first; among equals the lower rank first."""
    self_first = squares.clone().fill_diagonal_(-1)
    return torch.argsort(self_first, dim=1, stable=True)[:, :count]


class Majority:
    """The n // 2 + 1 gradients nearest to the medoid, the gradient with the smallest sum of distances to all.

    No minority can move them far, so iterations start at their mean and measure lengths by their radius.
    """

    def __init__(self, gram: Tensor) -> None:
        squares, ranks = squared_distances(gram), len(gram)
        self.medoid = int(squares.sqrt().sum(1).argmin())
        self.members = nearest(squares, ranks // 2 + 1)[self.medoid]
        self.radius = float(squares[self.medoid, self.members].max().sqrt())
        # Inner products with the medoid as the origin, so that what all gradients have in common cancels. Not
        # computed from distances: those of gradients far away would drown the others.
        across = gram[self.medoid]
        self._gram = gram - across[:, None] - across[None, :] + across[self.medoid]

    def mean(self) -> Tensor:
        """The mean of the majority, as weights of all ranks."""
        weights = self._gram.new_zeros(len(self._gram))
        weights[self.members] = 1 / len(self.members)
        return weights

    def distances_to(self, weights: Tensor) -> Tensor:
        """|g_i - sum_j w_j g_j| for each i and weights that add up to 1."""
        products = self._gram @ weights
        square = self._gram.diagonal() - 2 * products + products.dot(weights)
        return square.clamp_(min=0).sqrt_()
