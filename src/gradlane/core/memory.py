"""Tensors that outlive a step: flat in RAM, one entry per parameter name in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidValue
from .bucket import Bucket, Layout, Slot, as_layout
from .streams import used_by_current_stream
from .world_change import Fitting, Slots, misfit, sorted_out, summed


class Memory:
    """Tensors that outlive a step, kept by parameter name.

    ``like(bucket)`` is one flat tensor with the bucket's layout, zeros at first. DDP rebuilds its buckets
    after the first step, so a flat memory follows its parameters into a new layout by name, never by
    position. ``get`` and ``put`` keep one tensor of any shape per name.

    For checkpoints: ``shared`` says that it is equal on all ranks, bit for bit. Otherwise it is this rank's
    part of a sum over the ranks, and the sum stays the same when the number of ranks changes. ``any_shape``
    says that tensors that are ``put`` in it have names and shapes of their own; otherwise names and shapes
    must be those of parameters.

    An ``undoable`` memory has two buffers for everything: a step writes to one of them, and the values from
    before the step stay in the other until ``keep`` or ``undo`` decides between them.
    """

    def __init__(
        self, dtype: torch.dtype | None = None, *, shared: bool = False, any_shape: bool = False
    ) -> None:
        self.dtype = dtype
        self.shared = shared
        self.any_shape = any_shape
        self.undoable = False
        self._flats: dict[Layout, Tensor] = {}
        self._layout_of: dict[str, Layout] = {}  # by parameter: the layout that holds it now
        self._count: dict[Layout, int] = {}  # how many parameters a layout holds now
        self._single: dict[str, Tensor] = {}
        self._other: dict[Layout, Tensor] = {}  # the second buffers
        self._written: set[Layout] = set()  # whose second buffer this step has written
        self._replaced: dict[str, Tensor | None] = {}  # old values of what this step has ``put``
        self._blank: dict[str, Tensor | None] = {}  # second buffers of what ``put`` keeps

    def like(self, bucket: Bucket) -> Tensor:
        """The flat memory of this bucket; write to it in place."""
        written = as_layout(bucket.layout) in self._written
        before, after = self.buffers(bucket)
        if before is not after and not written:
            after.copy_(before)
        return after

    def buffers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """The flat memory, and the output buffer for its new values, all of which must be written.

        Both are the same tensor unless the memory is ``undoable``, or if this step has written already.
        """
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
        """Accept what was written since the last ``keep`` or ``undo``."""
        for layout in self._written:
            self._flats[layout], self._other[layout] = self._other[layout], self._flats[layout]
        self._blank |= self._replaced
        self._written.clear()
        self._replaced.clear()

    def undo(self) -> None:
        """Go back to the values from before the first write since the last ``keep`` or ``undo``."""
        self._written.clear()
        for name, old in self._replaced.items():
            self._blank[name] = self._single.pop(name, old)
            if old is not None:
                self._single[name] = old
        self._replaced.clear()

    def _moved_to(self, layout: Layout, like: Tensor) -> Tensor:
        flat = torch.zeros_like(like, dtype=self.width(like.dtype))
        for slot, view in layout.views(flat):
            old = self._found(slot)
            if old is not None:
                view.copy_(old)
                used_by_current_stream(old)
        for slot in layout:  # now that all shapes are checked
            self._remove(slot.name)
            self._layout_of[slot.name] = layout
        self._count[layout] = len(layout)
        self._flats[layout] = flat
        return flat

    def _remove(self, name: str) -> None:
        """From where it was kept. A flat memory is dropped with the last of its parameters."""
        layout = self._layout_of.get(name)
        if layout is None:
            self._single.pop(name, None)
            return
        self._count[layout] -= 1
        if not self._count[layout]:
            for by_layout in (self._count, self._flats, self._other):
                by_layout.pop(layout, None)

    def width(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype in which values of such a gradient are kept; for fp64 gradients fp32 is too narrow."""
        if gradient == torch.float64 and self.dtype == torch.float32:
            return gradient
        return self.dtype or gradient

    def _found(self, slot: Slot) -> Tensor | None:
        found = self.tensor(slot.name)
        if found is not None and found.shape != slot.shape:
            raise InvalidValue(
                f"the memory of {slot.name!r} has shape {tuple(found.shape)}, the parameter has "
                f"{tuple(slot.shape)}; load the state of the same model"
            )
        return found

    def tensor(self, name: str) -> Tensor | None:
        """What is kept under this name, flat or ``put``; not a copy."""
        layout = self._layout_of.get(name)
        return self._single.get(name) if layout is None else layout.view(self._flats[layout], name)

    @property
    def empty(self) -> bool:
        """Whether it holds nothing yet."""
        return not self._single and not self._layout_of

    def get(self, name: str) -> Tensor | None:
        return self._single.get(name)

    def blank(self, name: str, like: Tensor) -> Tensor:
        """A buffer for what ``put`` shall keep next under this name: the same memory in every step, and
        never the one that an ``undo`` would need."""
        buffer = self._blank.pop(name, None) if self.undoable else self._single.get(name)
        fits = buffer is not None and (buffer.shape, buffer.dtype, buffer.device) == (
            like.shape, like.dtype, like.device
        )  # fmt: skip
        return buffer if fits and buffer is not None else torch.empty_like(like)

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep this tensor, not a copy; do not write to one that was put before (see ``blank``).

        It must be your own. ``bucket.flat``, ``bucket.empty(...)`` and the answers of ``all_gather`` and
        ``all_to_all`` are overwritten by the next step, with other values on every rank: clone them.
        """
        if self.undoable:
            self._replaced.setdefault(name, self._single.get(name))
        self._single[name] = tensor

    def state_dict(self) -> dict[str, Tensor]:
        saved = {name: tensor.clone() for name, tensor in self._single.items()}
        for layout, flat in self._flats.items():
            for slot, view in layout.views(flat):
                if self._layout_of[slot.name] == layout:
                    saved[slot.name] = view.clone()
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise InvalidValue(
                    f"the memory of {name!r} is a {type(tensor).__name__}; a state holds tensors only"
                )
        by_layout = (self._flats, self._count, self._other, self._written)
        for container in (*by_layout, self._layout_of, self._replaced, self._blank):
            container.clear()
        self._single = {name: tensor.clone() for name, tensor in state.items()}

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Its state with another number of ranks, made of what each of the old ones saved."""
        return dict(saved[0]) if self.shared else dict(summed(saved, rank, world))

    def fitting(self, state: Mapping[str, Any], slots: Slots) -> Fitting:
        """The entries of a saved state that belong to these parameters, and why the others do not."""
        return sorted_out(
            state, ((name, misfit(t) or self._misfit(name, t, slots)) for name, t in state.items())
        )

    def _misfit(self, name: str, tensor: Tensor, slots: Slots) -> str | None:
        if self.any_shape:
            return None
        slot = slots.get(name)
        if slot is None:
            return "does not belong to this model (Memory(any_shape=True) takes any name)"
        if tensor.shape != slot.shape:
            return f"has shape {list(tensor.shape)}, the parameter has {list(slot.shape)}"
        width = self.width(slot.dtype)
        if self.dtype is not None and tensor.dtype != width:
            return f"is of {tensor.dtype}, this memory is of {width}"
        return None

    def __repr__(self) -> str:
        count = len(self._single) + len(self._layout_of)
        return f"Memory({count} parameters)" if count else "Memory()"

    def __eq__(self, other: object) -> bool:
        """Values do not count: strategies are compared by their options."""
        return isinstance(other, Memory) and self.dtype == other.dtype

    __hash__ = None  # type: ignore[assignment]
