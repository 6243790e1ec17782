"""Which gradients of a bucket travel as factors, and which travel dense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.bucket import Bucket, Slot, layout_digest
from ...core.streams import has_streams
from ...kernels.finite import all_finite
from .rank import Rank, View, rank_of

WHOLE_BUCKET = "bucket "
"""Prefix of the name of a matrix that is made of a whole bucket."""


class Matrix(NamedTuple):
    """A part of the flat gradient that travels as P (rank x rows) and Q (rank x columns)."""

    name: str
    start: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    @property
    def slot(self) -> Slot:
        return Slot(self.name, torch.Size([self.rows, self.columns]))


class Partition(NamedTuple):
    """A bucket's matrices, and its dense slices: all that is between them."""

    matrices: tuple[Matrix, ...]
    dense: tuple[slice, ...]

    def dense_numel(self) -> int:
        return sum(part.stop - part.start for part in self.dense)

    def gather_dense(self, flat: Tensor, residual: Tensor | None, into: Tensor) -> None:
        """Write the dense slices of flat, plus those of the residual, side by side into a message."""
        for where, part in self._dense_parts(into):
            if residual is None:
                part.copy_(flat[where])
            else:
                torch.add(flat[where], residual[where], out=part)

    def scatter_dense(self, dense: Tensor, into: Tensor) -> None:
        """Write the dense part of a message back to its slices of a flat tensor."""
        for where, part in self._dense_parts(dense):
            into[where].copy_(part)

    def clear_dense_residual(self, averaged: Tensor, residual: Tensor, residual_out: Tensor) -> None:
        """Dense slices lose nothing, so their new residual is zero. Where the mean is not finite the step
        delivered nothing, and the old residual stays."""
        if averaged.device.type == "meta":
            return
        # Then there is no need of a mask; on a device the host would have to wait for it.
        finite = not has_streams(averaged.device) and all_finite(averaged)
        for where, part in self._dense_parts(averaged):
            if finite:
                residual_out[where].zero_()
            else:
                residual_out[where].copy_(residual[where]).masked_fill_(part.isfinite(), 0.0)

    def _dense_parts(self, dense: Tensor) -> Iterator[tuple[slice, Tensor]]:
        start = 0
        for where in self.dense:
            stop = start + where.stop - where.start
            yield where, dense[start:stop]
            start = stop


def partition(bucket: Bucket, rank: Rank, min_compression_rate: float, view: View) -> Partition:
    """A matrix of a x b travels as factors of rank r where (a + b) r ``min_compression_rate`` < a b."""
    matrices = []
    for name, shape, start, rows, columns in _candidates(bucket, view):
        r = min(rows, columns, rank_of(rank, name, shape))
        if r and (rows + columns) * r * min_compression_rate < rows * columns:
            matrices.append(Matrix(name, start, rows, columns, r))
    return Partition(tuple(matrices), tuple(_between(matrices, bucket.flat.numel())))


class _Candidate(NamedTuple):
    name: str
    shape: torch.Size
    start: int
    rows: int
    columns: int


def _candidates(bucket: Bucket, view: View) -> list[_Candidate]:
    """Tensors of two or more dimensions as shape[0] x all other dimensions; or the bucket, nearly square.

    A bucket of n elements has isqrt(n) rows of equal length. The elements beyond the last full row, fewer
    than a row, are not part of the matrix.
    """
    if view == "bucket":
        numel = bucket.flat.numel()
        side = math.isqrt(numel)
        name = WHOLE_BUCKET + layout_digest(bucket.layout)
        return [_Candidate(name, torch.Size([numel]), 0, side, numel // side)] if side else []
    found, start = [], 0
    for name, shape in bucket.layout:
        numel = shape.numel()
        if len(shape) >= 2 and numel:
            found.append(_Candidate(name, shape, start, shape[0], numel // shape[0]))
        start += numel
    return found


def _between(matrices: list[Matrix], end: int) -> Iterator[slice]:
    start = 0
    for matrix in matrices:
        if start < matrix.start:
            yield slice(start, matrix.start)
        start = matrix.start + matrix.rows * matrix.columns
    if start < end:
        yield slice(start, end)
