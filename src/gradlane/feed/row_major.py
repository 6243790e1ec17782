"""Row-major copies of gradients whose parameters are channels_last or transposed.

DDP gives a gradient the strides of its parameter. Strategies see every gradient in row-major order, whatever
the strides are. So low rank finds its matrices, codecs form the same blocks, and memory belongs to the same
elements after a resume in another memory format. The price is a copy to and a copy back, for the buckets that
contain such a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Part(NamedTuple):
    """A part of a bucket: one parameter with other strides, or everything up to the next such parameter."""

    start: int
    shape: Sequence[int]
    stride: Sequence[int]

    def strided(self, flat: Tensor) -> Tensor:
        """A view of DDP's bucket with this part's elements in row-major order."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def contiguous(self, flat: Tensor) -> Tensor:
        """A view of the row-major copy."""
        return flat[self.start : self.start + torch.Size(self.shape).numel()].view(self.shape)


class RowMajorCopy:
    """Copies one of DDP's buckets to row-major order and back."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._buffer: Tensor | None = None  # the same memory in every step

    @torch.no_grad()
    def read(self, flat: Tensor) -> Tensor:
        buffer = self._buffer
        if buffer is None or buffer.shape != flat.shape or buffer.dtype != flat.dtype:
            buffer = self._buffer = torch.empty_like(flat)
        for part in self._parts:
            part.contiguous(buffer).copy_(part.strided(flat))
        return buffer

    @torch.no_grad()
    def write_back(self, mean: Tensor, into: Tensor) -> Tensor:
        for part in self._parts:
            part.strided(into).copy_(part.contiguous(mean))
        return into


def row_major_copy(parameters: Sequence[Tensor], flat: Tensor) -> RowMajorCopy | None:
    """For the bucket ``flat`` of these parameters; None if it is in row-major order already, or sparse."""
    if flat.is_sparse or not any(map(_has_other_strides, parameters)):
        return None
    if not flat.is_complex():  # since torch 2.13 complex gradients come as real pairs
        parameters = [torch.view_as_real(p.detach()) if p.is_complex() else p for p in parameters]
    return RowMajorCopy(list(_parts(parameters)))


def _parts(parameters: Sequence[Tensor]) -> Iterator[_Part]:
    begun, start = 0, 0
    for parameter in parameters:
        if _has_other_strides(parameter):
            if begun < start:
                yield _Part(begun, (start - begun,), (1,))
            yield _Part(start, tuple(parameter.shape), parameter.stride())
            begun = start + parameter.numel()
        start += parameter.numel()
    if begun < start:
        yield _Part(begun, (start - begun,), (1,))


def _has_other_strides(parameter: Tensor) -> bool:
    """DDP's rule: a gradient gets its parameter's strides if they cover a block of memory without gaps."""
    if parameter.is_contiguous():
        return False
    dimensions = zip(parameter.stride(), parameter.shape, strict=True)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in dimensions if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
