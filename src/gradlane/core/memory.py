"""The only mutable state: flat in RAM, one entry per parameter name in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidValue
from .bucket import Bucket, Layout, Slot, as_layout
from .world_change import Fitting, Slots, misfit, sorted_out, summed


class Memory:
    """Tensors that outlive a step, kept by parameter name.

    ``like(bucket)`` is one flat tensor with the bucket's layout, zeros at first. DDP rebuilds its
    buckets after the first step, so a flat memory follows its parameters into a new layout by name,
    never by position. ``get`` and ``put`` keep one tensor of any shape per name.

    For checkpoints: ``shared`` says that all ranks have the same in it, bit for bit. Otherwise it is a rank's
    own part of a sum over the ranks, which a change of their number keeps as it is. ``any_shape`` says that
    what is ``put`` in it has names and shapes of its own; otherwise they must be those of parameters.

    An ``undoable`` memory has two buffers for everything: a step writes to the one, and what was before
    it stays in the other until ``keep`` or ``undo`` says which of them counts.
    """

    def __init__(
        self, dtype: torch.dtype | None = None, *, shared: bool = False, any_shape: bool = False
    ) -> None:
        self.dtype = dtype
        self.shared = shared
        self.any_shape = any_shape
        self.undoable = False
        self._flats: dict[Layout, Tensor] = {}
        self._homes: dict[str, Layout] = {}  # the very key of ``_flats``
        self._living: dict[Layout, int] = {}  # how many parameters are at home there
        self._single: dict[str, Tensor] = {}
        self._other: dict[Layout, Tensor] = {}  # the second buffers
        self._written: set[Layout] = set()  # where this step's is in the second buffer
        self._replaced: dict[str, Tensor | None] = {}  # by ``put`` in this step
        self._blank: dict[str, Tensor | None] = {}  # second buffers of what ``put`` keeps

    def like(self, bucket: Bucket) -> Tensor:
        """The flat memory of this bucket; write to it in place."""
        written = as_layout(bucket.layout) in self._written
        before, after = self.buffers(bucket)
        if before is not after and not written:
            after.copy_(before)
        return after

    def buffers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """The flat memory as it is, and where to write what it becomes, all of it. The same tensor twice
        unless the memory is ``undoable``, or where the step has written already."""
        layout = as_layout(bucket.layout)
        before = self._flats.get(layout)
        if before is None:
            before = self._moved_to(layout, bucket.flat)
        if not self.undoable:
            return before, before
        after = self._other.get(layout)
        if after is None or after.dtype != before.dtype:
            after = self._other[layout] = torch.empty_like(before)
        if layout in self._written:
            return after, after
        self._written.add(layout)
        return before, after

    def keep(self) -> None:
        """What was written since the last ``keep`` or ``undo`` counts."""
        for layout in self._written:
            self._flats[layout], self._other[layout] = self._other[layout], self._flats[layout]
        self._blank |= self._replaced
        self._written.clear()
        self._replaced.clear()

    def undo(self) -> None:
        """Be as before all that was written since the last ``keep`` or ``undo``."""
        self._written.clear()
        for name, old in self._replaced.items():
            self._blank[name] = self._single.pop(name, old)
            if old is not None:
                self._single[name] = old
        self._replaced.clear()

    def _moved_to(self, layout: Layout, like: Tensor) -> Tensor:
        flat = torch.zeros_like(like, dtype=self.width(like.dtype))
        for slot, place in layout.views(flat):
            old = self._found(slot)
            if old is not None:
                place.copy_(old)
        for slot in layout:  # all of them fit
            self._move(slot.name)
            self._homes[slot.name] = layout
        self._living[layout] = len(layout)
        self._flats[layout] = flat
        return flat

    def _move(self, name: str) -> None:
        """Out of the flat memory where it was, which goes with the last of its parameters."""
        home = self._homes.get(name)
        if home is None:
            self._single.pop(name, None)
            return
        self._living[home] -= 1
        if not self._living[home]:
            for kept in (self._living, self._flats, self._other):
                kept.pop(home, None)

    def width(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype of what is kept of such a gradient; fp32 is wide enough, but not for fp64."""
        if gradient == torch.float64 and self.dtype == torch.float32:
            return gradient
        return self.dtype or gradient

    def _found(self, slot: Slot) -> Tensor | None:
        home = self._homes.get(slot.name)
        if home is not None:
            found: Tensor | None = home.view(self._flats[home], slot.name)
        else:
            found = self._single.get(slot.name)
        if found is not None and found.shape != slot.shape:
            raise InvalidValue(
                f"the memory of {slot.name!r} has shape {tuple(found.shape)}, the parameter has "
                f"{tuple(slot.shape)}; load the state of the same model"
            )
        return found

    def get(self, name: str) -> Tensor | None:
        return self._single.get(name)

    def blank(self, name: str, like: Tensor) -> Tensor:
        """Room for what ``put`` shall keep next under this name: in step after step the same pages, and
        never those that an ``undo`` would need."""
        room = self._blank.pop(name, None) if self.undoable else self._single.get(name)
        fits = room is not None and room.shape == like.shape and room.dtype == like.dtype
        return room if fits and room is not None else torch.empty_like(like)

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep this very tensor; do not write to one that was put before (see ``blank``).

        It must be your own: ``bucket.flat``, ``bucket.empty(...)`` and what ``all_gather`` and ``all_to_all``
        answer are written over by the next step, with something else on every rank. Clone them.
        """
        if self.undoable:
            self._replaced.setdefault(name, self._single.get(name))
        self._single[name] = tensor

    def state_dict(self) -> dict[str, Tensor]:
        saved = {name: tensor.clone() for name, tensor in self._single.items()}
        for layout, flat in self._flats.items():
            for slot, view in layout.views(flat):
                if self._homes[slot.name] is layout:
                    saved[slot.name] = view.clone()
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise InvalidValue(
                    f"the memory of {name!r} is a {type(tensor).__name__}; a state holds tensors only"
                )
        for kept in (self._flats, self._homes, self._living, self._other, self._written, self._replaced,
                     self._blank):  # fmt: skip
            kept.clear()
        self._single = {name: tensor.clone() for name, tensor in state.items()}

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """What is in it with another number of ranks, of what each of the old ones saved."""
        return dict(saved[0]) if self.shared else dict(summed(saved, rank, world))

    def fitting(self, state: Mapping[str, Any], slots: Slots) -> Fitting:
        """What of a saved state belongs to these parameters, and why the rest does not."""
        return sorted_out(
            state, ((name, misfit(t) or self._misfit(name, t, slots)) for name, t in state.items())
        )

    def _misfit(self, name: str, tensor: Tensor, slots: Slots) -> str | None:
        if self.any_shape:
            return None
        slot = slots.get(name)
        if slot is None:
            return "is no parameter of this model (Memory(any_shape=True) takes any name)"
        if tensor.shape != slot.shape:
            return f"has shape {list(tensor.shape)}, the parameter has {list(slot.shape)}"
        width = self.width(slot.dtype)
        if self.dtype is not None and tensor.dtype != width:
            return f"is of {tensor.dtype}, this memory is of {width}"
        return None

    def __repr__(self) -> str:
        count = len(self._single) + len(self._homes)
        return f"Memory({count} parameters)" if count else "Memory()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and self.dtype == other.dtype  # state is no option

    __hash__ = None  # type: ignore[assignment]
