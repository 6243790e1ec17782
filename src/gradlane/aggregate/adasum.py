"""AdaSum: between the sum and the mean, by how much gradients agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .mixture import Mixture
from .rule import GramRule


@dataclass(frozen=True)
class AdaSum(GramRule):
    """``(1 - <a, b> / 2 |a|^2) a + (1 - <a, b> / 2 |b|^2) b``, pair by pair up a binary tree over the ranks.

    Maleki et al., 2021, "Scaling distributed training with adaptive summation". Orthogonal gradients are
    added, equal ones averaged. Not robust: a wrong rank counts in full. The tree goes by rank, so the order
    of ranks matters where gradients are neither orthogonal nor equal; an odd one goes up unchanged.
    """

    def check(self, ranks: int) -> None:
        """Any number of ranks."""

    def mixture(self, gram: Tensor) -> Mixture:
        rows = list(torch.eye(len(gram), dtype=gram.dtype))
        while len(rows) > 1:
            odd = rows[len(rows) // 2 * 2 :]
            rows = [_added(a, b, gram) for a, b in zip(rows[::2], rows[1::2], strict=False)] + odd
        return Mixture(rows[0].view(1, -1))


def _added(a: Tensor, b: Tensor, gram: Tensor) -> Tensor:
    product = a @ gram @ b
    return _share(a, product, gram) * a + _share(b, product, gram) * b


def _share(row: Tensor, product: Tensor, gram: Tensor) -> Tensor:
    square = row @ gram @ row
    return 1 - torch.where(square > 0, product / (2 * square), 0.0)
