"""Which parameters are in which bucket: of this step, of the last one, and of the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.bucket import Layout, Slot


class Layouts:
    """The buckets of one model's steps, for checkpoints."""

    def __init__(self) -> None:
        self.current: list[tuple[Slot, ...]] = []
        """Those of this step so far."""
        self._last: list[tuple[Slot, ...]] = []  # of the last step that had all its buckets
        self._expected: list[list[str]] = []  # of the next step, if DDP has rebuilt its buckets since

    def begin_step(self) -> None:
        self.current = []

    def end_step(self) -> None:
        """The step has all its buckets."""
        self._last, self._expected = self.current, []

    def expect(self, names: list[list[str]]) -> None:
        """The next step will have other buckets than the last one."""
        self._expected = names

    def names(self) -> list[list[str]]:
        return self._expected or [[slot.name for slot in layout] for layout in self._last]


def layout_of(names: Sequence[str], parameters: Sequence[Tensor]) -> Layout:
    """The slots of a bucket; a complex parameter has pairs of real numbers."""
    return Layout(
        Slot(name, torch.Size((*parameter.shape, *((2,) if parameter.is_complex() else ()))))
        for name, parameter in zip(names, parameters, strict=True)
    )
