"""Which parameters a bucket holds, and at which offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

PART = re.compile(r"\[(\d+)/(\d+)\]$")
"""How the name of a part ends: its number, from 0, and how many parts there are."""


class Slot(NamedTuple):
    """One parameter of a bucket, or one part of it: its name in the module and its shape."""

    name: str
    shape: torch.Size

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def parameter(self) -> str:
        """The name in the module, also where the slot is a part of a parameter: ``weight[1/4]``."""
        part = PART.search(self.name)
        return self.name if part is None else self.name[: part.start()]


class Layout(tuple[Slot, ...]):
    """The slots of a bucket, side by side.

    A tuple that caches what costs a pass over all slots, its hash first: there may be ten thousand slots,
    and layouts are keys. It equals any tuple of the same slots.
    """

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self)

    @cached_property
    def offsets(self) -> dict[str, tuple[int, Slot]]:
        """Offset and slot of each parameter, by name."""
        found, start = {}, 0
        for slot in self:
            found[slot.name] = (start, slot)
            start += slot.numel
        return found

    @cached_property
    def digest(self) -> str:
        text = ";".join(f"{name}{tuple(shape)}" for name, shape in self)
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def views(self, flat: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """The parts of a flat tensor, one by one."""
        start = 0
        for slot in self:
            stop = start + slot.numel
            yield slot, flat[start:stop].view(slot.shape)
            start = stop

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of one parameter."""
        start, slot = self.offsets[name]
        return flat[start : start + slot.numel].view(slot.shape)


def as_layout(slots: tuple[Slot, ...]) -> Layout:
    return slots if isinstance(slots, Layout) else Layout(slots)
