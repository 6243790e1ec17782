"""Orthonormal factors on a device whose kernels run later: the host waits for nothing, and all ranks get the
same bits, on GPUs of other models too; ``products`` has the contract, and docs/design/0004-low-rank.md why.

A row is rounded to whole numbers, so few that a sum of products of two rows is exact in fp64. So no order of
summation changes it, and a BLAS may compute all of them. What follows is Gram-Schmidt on these inner products
instead of the rows, by kernels that round each element once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EXACT = 53  # bits of a whole number that fp64 holds
MIN_NEW_PART = (
    1e-8  # share of a row's square that must be new; of less, the inner products do not tell enough
)
EXPONENT = 0x7FF0_0000_0000_0000
FEW_ROWS = 8  # then a kernel costs more than what is padded


def computes_here(p: Tensor) -> bool:
    """fp64 factors go to the CPU, where they keep their digits, and so do all where fp64 does not exist."""
    if p.dtype != torch.float32:
        return False
    return p.device.type != "xpu" or bool(torch.xpu.get_device_properties(p.device).has_fp64)


def orthonormalise_all(factors: Sequence[Tensor], *, restart: bool) -> None:
    """Make the rows of each factor orthonormal in place. One that is not finite does not change, or with
    ``restart`` becomes unit vectors."""
    by_size: dict[tuple[int, int], list[Tensor]] = {}
    for p in factors:
        size = _sum_bits(p) if len(p) <= FEW_ROWS else (p.shape[1] - 1).bit_length()
        by_size.setdefault((len(p), size), []).append(p)
    by_rank: dict[int, list[_Batch]] = {}
    for (rank, _), alike in by_size.items():
        by_rank.setdefault(rank, []).append(_Batch(alike))
    for rank, batches in by_rank.items():
        combinations = _combinations(torch.cat([batch.products() for batch in batches]), rank)
        start = 0
        for batch in batches:
            batch.write(combinations[start : start + len(batch.factors)], restart=restart)
            start += len(batch.factors)


def _sum_bits(p: Tensor) -> int:
    """Bits that a sum over a row adds to those of its terms: a function of each factor alone, so that the
    result does not depend on the bucket that it comes in."""
    return max(13, (p.shape[1] - 1).bit_length())


class _Batch:
    """Factors of one rank whose sums add as many bits, padded with zeros: [factor, row, element]."""

    def __init__(self, factors: list[Tensor]) -> None:
        self.factors = factors
        rank, size = len(factors[0]), max(p.shape[1] for p in factors)
        self.given = factors[0].new_zeros(len(factors), rank, size)
        for p, padded in zip(factors, self.given, strict=True):
            padded[:, : p.shape[1]].copy_(p)
        largest = self.given.abs().amax(2, keepdim=True).double()
        self.finite = (largest < torch.inf).all(1, keepdim=True)  # of each factor
        # Rows are divided by a power of two, which is exact, and get as many bits as the sums allow.
        powers = (largest.view(torch.int64) & EXPONENT).view(torch.float64).clamp_(2.0**-149, 2.0**127)
        bits = (EXACT - max(map(_sum_bits, factors))) // 2
        rows = torch.where(self.finite, self.given, 0.0).double()
        self.rows = rows.div_(powers.mul_(2.0 ** (1 - bits))).round_()
        self.spares = min(2 * rank, size)

    def products(self) -> Tensor:
        """Inner products of all rows, and of the unit vectors of the first elements, which replace rows that
        are not new. At least half of one of 2 ``rank`` unit vectors is new."""
        rank, spares = self.rows.shape[1], 2 * self.rows.shape[1]
        products = self.rows.new_zeros(len(self.factors), rank + spares, rank + spares)
        products[:, :rank, :rank] = torch.bmm(self.rows, self.rows.mT)
        heads = self.rows[:, :, : self.spares]
        products[:, :rank, rank : rank + self.spares] = heads
        products[:, rank : rank + self.spares, :rank] = heads.mT
        products[:, rank : rank + self.spares, rank : rank + self.spares].diagonal(0, 1, 2).fill_(1.0)
        for p, own in zip(self.factors, products, strict=True):
            if p.shape[1] < self.spares:  # it has no such elements
                own[rank + p.shape[1] :].zero_()
        return products

    def write(self, combinations: Tensor, *, restart: bool) -> None:
        rank = self.rows.shape[1]
        basis = combinations[:, :, :1] * self.rows[:, :1]
        for row in range(1, rank):
            basis += combinations[:, :, row : row + 1] * self.rows[:, row : row + 1]
        basis[:, :, : self.spares] += combinations[:, :, rank : rank + self.spares]
        found = basis if restart else torch.where(self.finite, basis, self.given)
        for p, own in zip(self.factors, found, strict=True):
            p.copy_(own[:, : p.shape[1]])


def _combinations(products: Tensor, rank: int) -> Tensor:
    """By which combinations of rows and spares they become orthonormal: [factor, rank, row or spare].

    Row by row, what is left of all later ones is made orthogonal to it: a Cholesky decomposition. Each kernel
    computes its elements by themselves, so it has no order of summation either.
    """
    count = products.shape[1]
    own = torch.eye(count, dtype=products.dtype, device=products.device).expand_as(products)
    left = torch.cat([products, own], 2)
    enough = products.diagonal(0, 1, 2)[:, :rank] * MIN_NEW_PART
    found = []
    for k in range(rank):
        square = left[:, k, k]
        is_new = (square > enough[:, k]).unsqueeze(1)
        spare_square, spare = left[:, rank:, rank:count].diagonal(0, 1, 2).max(1)
        at = (spare + rank).view(-1, 1, 1).expand(-1, 1, left.shape[2])
        length = torch.where(is_new, square.unsqueeze(1), spare_square.unsqueeze(1)).sqrt_()
        row = torch.where(is_new, left[:, k], left.gather(1, at).squeeze(1)).div_(length)
        found.append(row[:, count:])
        left -= row[:, :count].unsqueeze(2) * row.unsqueeze(1)  # products are symmetric
    return torch.stack(found, 1)
