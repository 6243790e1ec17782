"""One flat gradient and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Tensor

from ..errors import InvalidValue
from .feedback import Feedback
from .layout import Layout, Slot, as_layout
from .scratch import Scratch

__all__ = ["Bucket", "Feedback", "Layout", "Slot", "as_layout", "layout_digest"]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """What a strategy receives: one flat gradient, and all that DDP knows about it.

    ``flat`` is yours during the call: you may overwrite it. It holds the parameters of ``layout`` side by
    side, each row by row, whatever its strides are. All other fields but ``rank`` and ``joined`` are the same
    on every rank.
    """

    flat: Tensor
    layout: tuple[Slot, ...]
    step: int
    rank: int
    world: int
    index: int = 0
    is_last: bool = True
    joined: bool = False
    """This rank ran out of data (``DDP.join``): it takes part, with a gradient of zeros."""
    feedback: Feedback | None = None
    """What an error-feedback wrapper asks for; None without one."""
    wire: torch.dtype | None = None
    """A ``Cast`` outside sends floating-point payloads in this width."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How many ranks a mean divides by, for each scope; for a scope that is not in it, ``world``."""
    places: Mapping[str, int] = field(default_factory=dict)
    """This rank's place in each scope; in the world it is ``rank``."""
    scratch: Scratch | None = field(default=None, repr=False, compare=False)
    """Keeps the buffers of ``empty``; without it every call allocates."""

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):  # any tuple of slots will do
            object.__setattr__(self, "layout", Layout(self.layout))

    @property
    def wants_sent(self) -> bool:
        """Whether a wrapper will call ``Reduced.sent``."""
        return self.feedback is not None and self.feedback.want_sent

    def divisor(self, over: str = "world") -> int:
        """What a mean over this scope divides by: its ranks, less those that joined early where
        ``join(divide_by_initial_world_size=False)`` asks for that."""
        return self.sizes.get(over, self.world)

    def place(self, over: str = "world") -> int:
        """This rank's place in a scope."""
        return self.places.get(over, self.rank)

    def as_seen(self, own: Tensor) -> Tensor:
        """A tensor of this rank as the others see it in a mean: rounded as ``wire`` does."""
        if self.wire is None or self.wire.itemsize >= own.element_size():
            return own
        count = self.divisor()
        return own.div(count).to(self.wire).to(own.dtype).mul_(count)

    @property
    def names(self) -> tuple[str, ...]:
        return as_layout(self.layout).names

    def tensors(self) -> list[Tensor]:
        """The gradients one by one, as views into ``flat``."""
        return [view for _, view in self._views()]

    def named(self) -> dict[str, Tensor]:
        """The same views by parameter name."""
        return dict(self._views())

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        if self.flat.is_sparse:  # DDP gives a sparse gradient a bucket of its own
            yield self.layout[0].name, self.flat
            return
        for slot, view in as_layout(self.layout).views(self.flat):
            yield slot.name, view

    def empty(self, use: str, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        """A flat, uninitialised buffer for one named use, the same one in every step.

        Give it a name that no other part of the strategy uses.
        """
        dtype = dtype or self.flat.dtype
        if self.scratch is None:
            return torch.empty(numel, dtype=dtype, device=self.flat.device)
        first_name = self.layout[0].name if self.layout else ""
        return self.scratch.get((first_name, use), numel, dtype, self.flat.device)

    def seed(self, salt: int, *, shared: bool, rank: int | None = None) -> int:
        """A seed for this bucket in this step: equal on all ranks if ``shared``, else this rank's own (or
        that of ``rank``, to decode what it has sent).

        It is a function of salt, step, parameters and rank. So there is no generator state to save, and a
        resumed run draws the same numbers as one that was never interrupted.
        """
        seed_rank = "" if shared else self.rank if rank is None else rank
        key = f"{salt}/{self.step}/{seed_rank}/{layout_digest(self.layout)}"
        return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1

    def with_flat(self, flat: Tensor) -> Bucket:
        """This bucket with another gradient of the same size."""
        if flat.shape != self.flat.shape:
            raise InvalidValue(
                f"with_flat got a tensor of shape {tuple(flat.shape)}, the bucket has "
                f"{tuple(self.flat.shape)}; pass one of the same size"
            )
        return replace(self, flat=flat)


def layout_digest(layout: tuple[Slot, ...]) -> str:
    return as_layout(layout).digest
