"""Buckets on their way to the lane: steps, memory, loss scale, the books."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Layout, Slot
from ..core.events import StepTimes, wire_bytes
from ..core.scratch import Scratch
from ..core.strategy import Strategy
from ..errors import NonFinite
from ..lane.base import Book, Finish, Lane, same
from .drift import DriftCheck
from .loss_scale import Scaler, unscaled
from .nonfinite import Guard
from .resumed_buckets import Regrouping


class Feed:
    """Between one model and its lane, wherever the buckets come from: DDP, or a loop of one's own."""

    def __init__(
        self, lane: Lane, book: Book, *, rank: int, sizes: Mapping[str, int], guard: Guard | None = None
    ) -> None:
        self.lane = lane
        self.guard = guard or Guard("propagate", lane.check)
        self.scaler: Scaler | None = None
        self.drift: DriftCheck | None = None
        self.book = book
        self.step = 0
        self.in_step = False
        self._rank = rank
        self._sizes = sizes
        self._world = sizes["world"]
        self._ready = 0.0  # when the first bucket of this step was
        self._way: Lane | Regrouping = lane  # of the buckets; another one after a resume, for a step
        self._buckets: list[tuple[Slot, ...]] = []  # of this step, or the last one
        self._whole: list[tuple[Slot, ...]] = []  # of the last whole step
        self._scratch: dict[int, Scratch] = {}  # by the address of the flat gradient

    def bucket(
        self, flat: Tensor, layout: tuple[Slot, ...], index: int, is_last: bool, *, joined: bool = False
    ) -> Bucket:
        """A flat gradient as strategies see it: a complex one as real pairs (and so is its layout)."""
        return Bucket(
            flat=torch.view_as_real(flat).view(-1) if flat.is_complex() else flat,
            layout=layout,
            step=self.step,
            rank=self._rank,
            world=self._world,
            index=index,
            is_last=is_last,
            joined=joined,
            sizes=self._sizes,
            scratch=self._scratch.setdefault(flat.data_ptr(), Scratch()) if not flat.is_sparse else None,
        )

    def begin(self, strategy: Strategy, *, joined: bool = False) -> None:
        """Before the first bucket of a step."""
        self.finish_step()
        self._ready = time.perf_counter()
        self._buckets = []
        self.guard.begin(strategy, self.step, joined=joined)

    def give(
        self,
        bucket: Bucket,
        strategy: Strategy,
        *,
        as_complex: bool = False,
        finish: Finish = same,
        loud: bool = False,
    ) -> Future[Tensor]:
        """The next bucket of the step that was begun; its mean, later, as ``finish`` leaves it."""
        self.guard.look_at_own(bucket)
        self._buckets.append(bucket.layout)
        self.in_step = not bucket.is_last
        if bucket.is_last:
            self._whole = self._buckets
        self.step += bucket.is_last
        raw = bucket.flat.numel() * bucket.flat.element_size()
        self.book.gradient(raw, wire_bytes("all_reduce", raw, self._world), bucket.is_last)
        whole = (lambda mean: finish(_complex(mean))) if as_complex else finish
        return self._way.submit(self._wrapped(strategy), bucket, finish=whole, loud=loud)

    def _wrapped(self, strategy: Strategy) -> Strategy:
        return unscaled(strategy, self.scaler)

    def finish_step(self) -> None:
        """Be done with a step that nobody has ended: a joined rank's, or one that was given up."""
        self.lane.drain()
        failed = self.lane.take_failure() is not None  # who waited for the futures has been told
        if (trouble := self._counted(failed or self.in_step)) is not None:
            raise trouble

    def _counted(self, failed: bool) -> NonFinite | None:
        if not self.guard.open:
            return None
        trouble = self.guard.ended(failed=failed)
        if self.guard.skipped:
            self.book.skipped()
        return trouble

    def step_ended(
        self, computed: float, ended: float, failure: BaseException | None
    ) -> BaseException | None:
        """The lane is idle, and the ``failure`` is what it told. What to raise, if anything."""
        trouble = self._counted(failure is not None)
        self.book.step_ended(StepTimes(self.step - 1, self._ready, computed, ended))
        if failure is None and self.drift is not None and self.drift.due(self.step - 1):
            failure = self.drift.trouble(self.step - 1)
        return failure or trouble

    def layout(self) -> list[list[str]]:
        """The names of the parameters in each bucket, as strategies see them; none before the first step."""
        if isinstance(self._way, Regrouping):
            return self._way.layout
        return self._names()

    def _names(self) -> list[list[str]]:
        return [[slot.name for slot in layout] for layout in self._whole]

    def go_to(self, step: int, layout: Sequence[Sequence[str]] = ()) -> None:
        """Number the next step anew, as a resumed run does; and begin with the buckets of ``layout``."""
        self.step = step
        self._way = Regrouping(self.lane, layout, self._go_straight) if layout else self.lane
        self.lane.forget_failure()  # that step may have failed in this process, in another life

    def _go_straight(self) -> None:
        self._way = self.lane


def _complex(mean: Tensor) -> Tensor:
    return torch.view_as_complex(mean.view(-1, 2))


def layout_of(names: Sequence[str], parameters: Sequence[Tensor]) -> Layout:
    """The slots of a bucket of one dtype."""
    return Layout(
        Slot(name, torch.Size((*parameter.shape, *((2,) if parameter.is_complex() else ()))))
        for name, parameter in zip(names, parameters, strict=True)
    )
