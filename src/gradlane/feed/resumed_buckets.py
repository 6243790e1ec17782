"""The first steps after a resume, in the buckets of the run that was saved.

DDP rebuilds its buckets after the first backward. So the first backward after a resume has other buckets than
the run would have had without the stop: sums over four ranks would differ in their last bits, and codecs
would form other blocks.
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
from ..core.streams import devices_of_futures
from ..lane.base import Finish, Lane, same
from ..log import log

Names = Sequence[Sequence[str]]
MAX_STEPS = 2  # DDP rebuilds its buckets after the first step, with static_graph after the second


@dataclass
class _Submitted:
    """A bucket of DDP that waits for the others of its step."""

    bucket: Bucket
    finish: Finish
    raises: bool
    future: Future[Tensor]

    def answer(self, mean: Tensor) -> None:
        self.future.set_result(self.finish(mean))


class _Piece(NamedTuple):
    """One parameter, and its offset in a bucket of DDP."""

    slot: Slot
    source: _Submitted
    start: int

    def view(self) -> Tensor:
        return self.source.bucket.flat[self.start : self.start + self.slot.numel]


class ResumedBuckets:
    """Takes DDP's buckets in place of the lane. When all have come it gives the lane those of ``layout``.

    It ends by itself, when DDP's own buckets are the wanted ones, or after two steps if they are not.
    """

    def __init__(self, lane: Lane, layout: Names, end: Callable[[], None]) -> None:
        self.layout = [list(names) for names in layout]
        self._lane = lane
        self._end = end
        self._submitted: list[_Submitted] = []
        self._remaining = MAX_STEPS

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, raises: bool = False
    ) -> Future[Tensor]:
        if bucket.index == 0:
            self._submitted.clear()  # of a backward that stopped
        future: Future[Tensor] = Future(devices=devices_of_futures(bucket.flat.device))
        submitted = _Submitted(bucket, finish, raises, future)
        self._submitted.append(submitted)
        if bucket.is_last:
            everything, self._submitted = self._submitted, []
            with torch.no_grad():  # backward may be recording (create_graph)
                self._regroup(strategy, everything)
        return submitted.future

    def _regroup(self, strategy: Strategy, sources: list[_Submitted]) -> None:
        names = [list(source.bucket.names) for source in sources]
        groups = _groups(sources, self.layout) if self._remaining and names != self.layout else None
        if groups is None:
            self._end()
            if names != self.layout:
                log.warning("DDP's buckets are not those of the checkpoint; the run goes on with DDP's")
            for source in sources:
                self._submit(strategy, source.bucket, source.answer, [source])
            return
        self._remaining -= 1
        answers = _Answers(sources, len(groups))
        for index, group in enumerate(groups):
            first = group[0].source
            if [piece.slot for piece in group] == list(first.bucket.layout):
                bucket, done = first.bucket, partial(answers.set_mean, first)
            else:
                bucket, done = _joined(group), partial(answers.spread, group)
            bucket = replace(bucket, index=index, is_last=index == len(groups) - 1)
            self._submit(strategy, bucket, done, sources)

    def _submit(
        self, strategy: Strategy, bucket: Bucket, done: Callable[[Tensor], None], sources: list[_Submitted]
    ) -> None:
        def finish(mean: Tensor) -> Tensor:
            done(mean)
            return mean

        def pass_on(future: Future[Tensor]) -> None:
            try:
                future.value()
            except Exception as error:  # noqa: BLE001  DDP waits for its own futures, and raises it
                for source in sources:
                    if not source.future.done():
                        source.future.set_exception(error)  # type: ignore[arg-type]

        future = self._lane.submit(strategy, bucket, finish=finish, raises=sources[0].raises)
        future.add_done_callback(pass_on)


class _Answers:
    """Answers all of DDP's buckets when the last of the lane's buckets is answered."""

    def __init__(self, sources: list[_Submitted], groups: int) -> None:
        self._means = {id(source): source.bucket.flat for source in sources}
        self._sources, self._remaining = sources, groups

    def set_mean(self, source: _Submitted, mean: Tensor) -> None:
        self._means[id(source)] = mean
        self._count_down()

    def spread(self, group: list[_Piece], mean: Tensor) -> None:
        start = 0
        for piece in group:
            piece.view().copy_(mean[start : start + piece.slot.numel])
            start += piece.slot.numel
        self._count_down()

    def _count_down(self) -> None:
        self._remaining -= 1
        if not self._remaining:
            for source in self._sources:
                source.answer(self._means[id(source)])


def _groups(sources: list[_Submitted], layout: Names) -> list[list[_Piece]] | None:
    """DDP's parameters in the wanted buckets; None if they do not fit."""
    pieces: dict[str, _Piece] = {}
    for source in sources:
        start = 0
        for slot in source.bucket.layout:
            pieces[slot.name] = _Piece(slot, source, start)
            start += slot.numel
    if sorted(pieces) != sorted(name for names in layout for name in names):
        return None
    groups = [[pieces[name] for name in names] for names in layout if names]
    for group in groups:
        flats = [piece.source.bucket.flat for piece in group]
        if len({flat.dtype for flat in flats}) > 1:
            return None
        if len(group) > 1 and any(flat.is_sparse for flat in flats):
            return None
    return groups


def _joined(group: list[_Piece]) -> Bucket:
    flat = torch.cat([piece.view() for piece in group])
    layout = tuple(piece.slot for piece in group)
    return replace(group[0].source.bucket, flat=flat, layout=layout, scratch=Scratch())
