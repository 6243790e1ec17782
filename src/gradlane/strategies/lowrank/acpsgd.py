"""ACP-SGD: one factor a step, in turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core.bucket import Bucket
from ...core.collectives import all_reduce
from ...core.memory import Memory
from ...core.numbers import is_small
from ...core.strategy import Reduced, Strategy
from ...kernels.bf16_residual import add_residual, subtract_product
from ...kernels.finite import all_finite
from ...kernels.products import expand, project_columns, project_rows
from .factors import (
    FactorMemory,
    keep_factors,
    kept_factor,
    message_for,
    message_in,
    narrowed_back,
    widened,
)
from .matrices import Matrix, Rank, View, check_common, cut


@dataclass
class AcpSGD(Strategy):
    """Alternately compressed PowerSGD (Zhang et al., 2023): half the bytes, and one collective a bucket.

    1. In even steps Q is known to all and orthonormal: P = M Q is averaged. In odd steps P is: Q = M^T P is.
    2. The answer is P Q^T; a rank owes M less the product with its own factor.
    3. The factor that was sent is made orthonormal, and is the known one in the next step.

    M has the residual in it: wrap it in ``ErrorFeedback``. Options are those of ``PowerSGD``. Each step
    fits one factor only, so what arrives is further from M than PowerSGD's answer of the same rank.
    """

    rank: Rank = 4
    min_compression_rate: float = 2
    view: View = "tensor"
    seed: int = 0
    left: Memory | None = None
    right: Memory | None = None
    fuses_feedback: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_common("AcpSGD", self.rank, self.min_compression_rate, self.view, self.seed)
        self.left = self.left or FactorMemory()
        self.right = self.right or FactorMemory()

    @property
    def averages(self) -> bool:
        return True

    async def reduce(self, bucket: Bucket) -> Reduced:
        assert self.left is not None
        assert self.right is not None
        sends_rows = bucket.step % 2 == 0
        parts = cut(bucket, self.rank, self.min_compression_rate, self.view)
        matrices = parts.matrices
        flat, residual, residual_out = widened(bucket), bucket.residual, bucket.residual_after
        wide, narrow = residual, None  # the residual for the products, and one that is too narrow for them
        if residual is not None and residual.dtype != flat.dtype:
            add_residual(flat, residual)
            wide, narrow = None, residual
        known_in, sent_in = (self.right, self.left) if sends_rows else (self.left, self.right)
        sizes = [m.rows if sends_rows else m.columns for m in matrices]
        others = [m.columns if sends_rows else m.rows for m in matrices]
        known = [
            kept_factor(known_in, bucket, m, size, self.seed)
            for m, size in zip(matrices, others, strict=True)
        ]
        message = message_for(bucket, "factors P" if sends_rows else "factors Q", parts, sizes, rest=True)

        parts.gather(flat, wide, message.rest)
        project = project_rows if sends_rows else project_columns
        for m, fixed, factor in zip(matrices, known, message.factors, strict=True):  # 1
            before, after = (
                None if part is None or wide is None else m.of(part) for part in (wide, residual_out)
            )
            project(m.of(flat), before, fixed, factor, subtract=wide is not None, residual_out=after)
            if narrow is not None and residual_out is not None:
                p, q = (factor, fixed) if sends_rows else (fixed, factor)
                subtract_product(m.of(flat), p, q, m.of(narrow), m.of(residual_out))
        mine = message.flat.clone() if bucket.feedback else None
        message = message_in(await all_reduce(message.flat), parts, sizes, message.rest.numel())

        whole = [all_finite(factor) for factor in message.factors]
        bounded = is_small(message.flat)  # the other factor is orthonormal
        _expand_all(matrices, message.factors, known, flat, sends_rows)  # 2
        parts.scatter(message.rest, flat)
        if residual is not None:
            parts.settle_rest(message.rest, residual, residual_out)
        kept = zip(matrices, message.factors, whole, strict=True)
        keep_factors(sent_in, [(m, factor) for m, factor, fine in kept if fine])  # 3

        def sent() -> Tensor:
            assert mine is not None
            own = message_in(bucket.as_seen(mine), parts, sizes, message.rest.numel())
            out = torch.empty_like(flat)
            _expand_all(matrices, own.factors, known, out, sends_rows)
            parts.scatter(own.rest, out)
            return out.to(bucket.flat.dtype)

        return Reduced(narrowed_back(bucket, flat), sent if mine is not None else None, bounded)


def _expand_all(
    matrices: tuple[Matrix, ...], sent: list[Tensor], known: list[Tensor], into: Tensor, sent_rows: bool
) -> None:
    for m, factor, other in zip(matrices, sent, known, strict=True):
        p, q = (factor, other) if sent_rows else (other, factor)
        expand(p, q, m.of(into))
