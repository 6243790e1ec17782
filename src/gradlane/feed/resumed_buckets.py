"""The first steps after a resume, in the buckets of the run that was saved.

DDP rebuilds its buckets after the first backward, so the first one after a resume has others than the run had
that never stopped: sums over four ranks would differ in their last bits, and codecs would cut other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Slot
from ..core.scratch import Scratch
from ..core.strategy import Strategy
from ..lane.base import Finish, Lane, same
from ..log import log

Names = Sequence[Sequence[str]]
PATIENCE = 2  # steps; DDP rebuilds its buckets after the first, with static_graph after the second


@dataclass
class _Held:
    """One of DDP's buckets, until all have come."""

    bucket: Bucket
    finish: Finish
    loud: bool
    future: Future[Tensor]

    def answer(self, mean: Tensor) -> None:
        self.future.set_result(self.finish(mean))


class _Piece(NamedTuple):
    """One parameter, and where it lies in a bucket of DDP."""

    slot: Slot
    held: _Held
    start: int

    def view(self) -> Tensor:
        return self.held.bucket.flat[self.start : self.start + self.slot.numel]


class Regrouping:
    """Takes DDP's buckets in place of the lane, and gives the lane those of ``layout`` when all have come.

    It ends by itself: as soon as DDP's own buckets are the wanted ones, or after two steps if they are not.
    """

    def __init__(self, lane: Lane, layout: Names, end: Callable[[], None]) -> None:
        self.layout = [list(names) for names in layout]
        self._lane = lane
        self._end = end
        self._held: list[_Held] = []
        self._left = PATIENCE

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, loud: bool = False
    ) -> Future[Tensor]:
        if bucket.index == 0:
            self._held.clear()  # of a backward that was given up
        device = bucket.flat.device
        held = _Held(bucket, finish, loud, Future(devices=[] if device.type == "cpu" else [device]))
        self._held.append(held)
        if bucket.is_last:
            everything, self._held = self._held, []
            with torch.no_grad():  # backward may be recording (create_graph)
                self._go(strategy, everything)
        return held.future

    def _go(self, strategy: Strategy, held: list[_Held]) -> None:
        given = [list(own.bucket.names) for own in held]
        groups = _groups(held, self.layout) if self._left and given != self.layout else None
        if groups is None:
            self._end()
            if given != self.layout:
                log.warning("DDP's buckets are not those of the checkpoint; the run goes on with DDP's")
            for own in held:
                self._submit(strategy, own.bucket, own.answer, [own])
            return
        self._left -= 1
        waiting = _Waiting(held, len(groups))
        for index, group in enumerate(groups):
            first = group[0].held
            if [piece.slot for piece in group] == list(first.bucket.layout):
                bucket, done = first.bucket, partial(waiting.answered, first)
            else:
                bucket, done = _together(group), partial(waiting.spread, group)
            bucket = replace(bucket, index=index, is_last=index == len(groups) - 1)
            self._submit(strategy, bucket, done, held)

    def _submit(
        self, strategy: Strategy, bucket: Bucket, done: Callable[[Tensor], None], held: list[_Held]
    ) -> None:
        def finish(mean: Tensor) -> Tensor:
            done(mean)
            return mean

        def pass_on(future: Future[Tensor]) -> None:
            try:
                future.value()
            except Exception as error:  # noqa: BLE001  DDP waits for its own futures, and shows it
                for own in held:
                    if not own.future.done():
                        own.future.set_exception(error)  # type: ignore[arg-type]

        future = self._lane.submit(strategy, bucket, finish=finish, loud=held[0].loud)
        future.add_done_callback(pass_on)


class _Waiting:
    """DDP's buckets are answered together, when the last of the lane's is."""

    def __init__(self, held: list[_Held], groups: int) -> None:
        self._means = {id(own): own.bucket.flat for own in held}
        self._held, self._left = held, groups

    def answered(self, own: _Held, mean: Tensor) -> None:
        self._means[id(own)] = mean
        self._one_less()

    def spread(self, group: list[_Piece], mean: Tensor) -> None:
        start = 0
        for piece in group:
            piece.view().copy_(mean[start : start + piece.slot.numel])
            start += piece.slot.numel
        self._one_less()

    def _one_less(self) -> None:
        self._left -= 1
        if not self._left:
            for own in self._held:
                own.answer(self._means[id(own)])


def _groups(held: list[_Held], layout: Names) -> list[list[_Piece]] | None:
    """DDP's parameters in the wanted buckets; None where they do not fit into them."""
    pieces: dict[str, _Piece] = {}
    for own in held:
        start = 0
        for slot in own.bucket.layout:
            pieces[slot.name] = _Piece(slot, own, start)
            start += slot.numel
    if sorted(pieces) != sorted(name for names in layout for name in names):
        return None
    groups = [[pieces[name] for name in names] for names in layout if names]
    for group in groups:
        flats = [piece.held.bucket.flat for piece in group]
        if len({flat.dtype for flat in flats}) > 1:
            return None
        if len(group) > 1 and any(flat.is_sparse for flat in flats):
            return None
    return groups


def _together(group: list[_Piece]) -> Bucket:
    flat = torch.cat([piece.view() for piece in group])
    layout = tuple(piece.slot for piece in group)
    return replace(group[0].held.bucket, flat=flat, layout=layout, scratch=Scratch())
