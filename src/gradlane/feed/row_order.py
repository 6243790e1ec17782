"""Gradients that DDP lays out as their parameters lie in memory: channels_last, or transposed.

Strategies see every gradient row by row, whatever its parameter's strides are. So low rank finds the
matrices, codecs cut the same blocks, and what is remembered belongs to the same elements after a resume in
another memory format. It costs a copy there and one back, of the buckets that hold such a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Run(NamedTuple):
    """A part of a bucket: one parameter with its strides, or all up to the next such one."""

    start: int
    shape: Sequence[int]
    stride: Sequence[int]

    def stored(self, flat: Tensor) -> Tensor:
        """Its elements in their order, where DDP has them."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def straight(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + torch.Size(self.shape).numel()].view(self.shape)


class Order:
    """Between a bucket of DDP and the same one row by row."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = runs
        self._room: Tensor | None = None  # the same pages in every step

    @torch.no_grad()
    def straightened(self, flat: Tensor) -> Tensor:
        room = self._room
        if room is None or room.shape != flat.shape or room.dtype != flat.dtype:
            room = self._room = torch.empty_like(flat)
        for run in self._runs:
            run.straight(room).copy_(run.stored(flat))
        return room

    @torch.no_grad()
    def put_back(self, straight: Tensor, into: Tensor) -> Tensor:
        for run in self._runs:
            run.stored(into).copy_(run.straight(straight))
        return into


def order_of(parameters: Sequence[Tensor], flat: Tensor) -> Order | None:
    """Of their gradients in ``flat``; None where all lie row by row already, or say themselves where."""
    if flat.is_sparse or not any(map(_lies_otherwise, parameters)):
        return None
    if not flat.is_complex():  # as of torch 2.13 complex gradients come as real pairs
        parameters = [torch.view_as_real(p.detach()) if p.is_complex() else p for p in parameters]
    return Order(list(_runs(parameters)))


def _runs(parameters: Sequence[Tensor]) -> Iterator[_Run]:
    begun, start = 0, 0
    for parameter in parameters:
        if _lies_otherwise(parameter):
            if begun < start:
                yield _Run(begun, (start - begun,), (1,))
            yield _Run(start, tuple(parameter.shape), parameter.stride())
            begun = start + parameter.numel()
        start += parameter.numel()
    if begun < start:
        yield _Run(begun, (start - begun,), (1,))


def _lies_otherwise(parameter: Tensor) -> bool:
    """DDP's rule: the gradient gets the parameter's strides if these fill a block of memory without gaps."""
    if parameter.is_contiguous():
        return False
    sides = sorted((stride, size) for stride, size in zip(parameter.stride(), parameter.shape, strict=True)
                   if size > 1)  # fmt: skip
    expected = 1
    for stride, size in sides:
        if stride != expected:
            return False
        expected *= size
    return True
