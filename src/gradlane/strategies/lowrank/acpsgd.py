"""ACP-SGD: one factor a step, P in even steps and Q in odd ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...core.bucket import Bucket, Feedback
from ...core.collectives import all_reduce
from ...core.memory import Memory
from ...core.numbers import is_bounded
from ...core.strategy import Reduced, Strategy
from ...kernels.bf16_residual import add_residual, subtract_product
from ...kernels.products import expand, project_columns, project_rows
from .factors import (
    FactorMemory,
    keep_factors,
    kept_factor,
    message_in,
    narrowed_back,
    new_message,
    widened,
)
from .partition import Matrix, partition
from .rank import Rank, View, check_options


@dataclass
class AcpSGD(Strategy):
    """Alternately compressed PowerSGD (Zhang et al., 2023): half the bytes, and one collective a bucket.

    1. In even steps all ranks know an orthonormal Q, and average P = M Q. In odd steps they know P, and
       average Q = M^T P.
    2. The answer is P Q^T; the residual of a rank is M less the product with its own factor.
    3. The factor that was sent is made orthonormal, and is the known one in the next step.

    M includes the residual: wrap it in ``ErrorFeedback``. Options are those of ``PowerSGD``. Each step fits
    one factor only, so the answer is further from M than PowerSGD's answer of the same rank.
    """

    rank: Rank = 4
    min_compression_rate: float = 2
    view: View = "tensor"
    seed: int = 0
    left: Memory = field(init=False, default_factory=FactorMemory)
    """P, by matrix."""
    right: Memory = field(init=False, default_factory=FactorMemory)
    """Q, by matrix."""
    fuses_feedback: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options("AcpSGD", self.rank, self.min_compression_rate, self.view, self.seed)

    @property
    def averages(self) -> bool:
        return True

    async def reduce(self, bucket: Bucket) -> Reduced:
        sends_p = bucket.step % 2 == 0
        parts = partition(bucket, self.rank, self.min_compression_rate, self.view)
        matrices, flat, feedback = parts.matrices, widened(bucket), bucket.feedback or Feedback()
        residual, residual_out = feedback.residual, feedback.residual_out
        narrow = residual is not None and residual.dtype != flat.dtype  # a residual in bfloat16
        if narrow and residual is not None:
            add_residual(flat, residual)
        to_add = None if narrow else residual  # what the projection adds and subtracts
        known_memory, sent_memory = (self.right, self.left) if sends_p else (self.left, self.right)
        sizes = [m.rows if sends_p else m.columns for m in matrices]
        other_sizes = [m.columns if sends_p else m.rows for m in matrices]
        known = [
            kept_factor(known_memory, bucket, m, size, self.seed)
            for m, size in zip(matrices, other_sizes, strict=True)
        ]
        use = "factors P" if sends_p else "factors Q"
        message = new_message(bucket, use, parts, sizes, with_dense=True)

        parts.gather_dense(flat, to_add, message.dense)
        project = project_rows if sends_p else project_columns
        for m, fixed, factor in zip(matrices, known, message.factors, strict=True):  # 1
            before = None if to_add is None else m.of(to_add)
            after = None if to_add is None or residual_out is None else m.of(residual_out)
            project(m.of(flat), before, fixed, factor, subtract=to_add is not None, residual_out=after)
            if narrow and residual is not None and residual_out is not None:
                p, q = (factor, fixed) if sends_p else (fixed, factor)
                subtract_product(m.of(flat), p, q, m.of(residual), m.of(residual_out))
        own = message.flat.clone() if bucket.wants_sent else None
        message = message_in(await all_reduce(message.flat), parts, sizes, message.dense.numel())

        bounded = is_bounded(message.flat)  # the other factor is orthonormal
        _expand_all(matrices, message.factors, known, flat, sends_p)  # 2
        parts.scatter_dense(message.dense, flat)
        if residual is not None and residual_out is not None:
            parts.clear_dense_residual(message.dense, residual, residual_out)
        keep_factors(sent_memory, list(zip(matrices, message.factors, strict=True)))  # 3
        if own is None:
            return Reduced(narrowed_back(bucket, flat), bounded=bounded)

        def sent() -> Tensor:
            seen = message_in(bucket.as_seen(own), parts, sizes, message.dense.numel())
            out = torch.empty_like(flat)
            _expand_all(matrices, seen.factors, known, out, sends_p)
            parts.scatter_dense(seen.dense, out)
            return out.to(bucket.flat.dtype)

        return Reduced(narrowed_back(bucket, flat), sent, bounded)


def _expand_all(
    matrices: tuple[Matrix, ...], sent: list[Tensor], known: list[Tensor], into: Tensor, sent_p: bool
) -> None:
    for m, factor, other in zip(matrices, sent, known, strict=True):
        p, q = (factor, other) if sent_p else (other, factor)
        expand(p, q, m.of(into))
