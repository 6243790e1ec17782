"""Parameters in equal parts, one for each rank of a scope."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from ..torch_internals import copy_each, zero_each
from .layout import Layout, Slot

MOST_PADDING = 1 / 8  # of a parameter; where rows would need more, elements are cut


class Parts:
    """How the parameters of a layout are cut.

    Each parameter is cut by its rows, and the last part is padded with zeros. Who has what depends neither on
    buckets nor on their order, so a memory of parts stays where it is when DDP rebuilds its buckets. A
    parameter of few rows is cut by elements, because a part has at least a row.
    """

    def __init__(self, layout: Layout, count: int) -> None:
        self.count = count
        self._whole = layout
        sizes = [part_shape(slot.shape, count).numel() for slot in layout]
        self.numel = sum(sizes)
        """Elements of a part, padding included."""
        self._filled = [
            [min(size, max(0, slot.numel - place * size)) for slot, size in zip(layout, sizes, strict=True)]
            for place in range(count)
        ]
        """Elements of each parameter in each part, without padding."""
        self._lengths = [
            list(chain(*((filled, size - filled) for filled, size in zip(part, sizes, strict=True))))
            for part in self._filled
        ]
        """The same, each followed by its padding."""

    def layout(self, place: int) -> Layout:
        """The slots of one part; their names say which part it is."""
        return _part_layout(self._whole, self.count, place)

    def cut(self, flat: Tensor, into: Tensor) -> Tensor:
        """All parts of a bucket, one after the other."""
        parts = into.view(self.count, self.numel)
        copy_each(self._pieces_of_parts(parts.unbind()), self._pieces(flat))
        if self.numel * self.count > flat.numel():
            zero_each(self._paddings(parts.unbind()))
        return into

    def join(self, parts: Sequence[Tensor], into: Tensor) -> Tensor:
        """The bucket, from all its parts."""
        copy_each(self._pieces(into), self._pieces_of_parts(parts))
        return into

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's piece in each part, parameter by parameter."""
        return list(flat.split_with_sizes(list(chain(*zip(*self._filled, strict=True)))))

    def _pieces_of_parts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The same pieces where they lie in the parts."""
        pieces = [part.split_with_sizes(n)[::2] for part, n in zip(parts, self._lengths, strict=True)]
        return list(chain(*zip(*pieces, strict=True)))

    def _paddings(self, parts: Sequence[Tensor]) -> list[Tensor]:
        split = (part.split_with_sizes(n)[1::2] for part, n in zip(parts, self._lengths, strict=True))
        return [padding for padding in chain(*split) if padding.numel()]


@lru_cache(maxsize=1024)
def parts_of(layout: Layout, count: int) -> Parts:
    return Parts(layout, count)


@lru_cache(maxsize=1024)
def _part_layout(whole: Layout, count: int, place: int) -> Layout:
    return Layout(Slot(part_name(slot.name, place, count), part_shape(slot.shape, count)) for slot in whole)


def part_shape(shape: torch.Size, count: int) -> torch.Size:
    """The shape of one of ``count`` parts of a parameter."""
    if not shape:
        return torch.Size([1])
    rows = -(-shape[0] // count)
    if rows * count <= (1 + MOST_PADDING) * shape[0]:
        return torch.Size([rows, *shape[1:]])
    return torch.Size([-(-shape.numel() // count)])


def rows_shape(shape: torch.Size, count: int) -> torch.Size:
    """The shape of one of ``count`` parts by rows, however much padding that needs: FSDP's rule."""
    return torch.Size([-(-shape[0] // count), *shape[1:]])


def part_name(name: str, place: int, count: int) -> str:
    """``weight[1/4]``: the second of four parts."""
    return f"{name}[{place}/{count}]"
