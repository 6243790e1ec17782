"""Tensor parallelism: parameters of which other ranks have copies, beside those of which they have pieces.

Ranks that have copies of a parameter must get the same answer for it, although each is in a data-parallel
group of its own. A codec's answer depends on all of a bucket, and pieces differ. So copies travel in a bucket
of their own: the same gradients give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.bucket import Bucket, Layout
from ..core.collectives import StepSum
from ..core.running import intercept
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue


class _Kind(NamedTuple):
    """All copies of a bucket, or all pieces: their slots, and where they are."""

    name: str
    layout: Layout
    spans: list[slice]


@dataclass
class CopiesApart(Strategy):
    """``inner`` for copies, and then for pieces. ``pieces``: which slots of a bucket are some."""

    inner: Strategy
    pieces: tuple[bool, ...]

    async def reduce(self, bucket: Bucket) -> Reduced:
        bounded = True
        for kind in self._kinds(bucket.layout, 1):
            flat = torch.cat([bucket.flat[span] for span in kind.spans])
            reduced = await self._run(self.inner.reduce(_part(bucket, kind, flat)))
            _put_back(reduced.mean, kind.spans, bucket.flat)
            bounded = bounded and reduced.bounded
        return Reduced(bucket.flat, bounded=bounded)

    async def scatter(self, bucket: Bucket) -> Tensor:
        parts = bucket.flat.view(bucket.world, -1)
        answer = torch.empty_like(parts[0])
        for kind in self._kinds(bucket.layout, bucket.world):
            flat = torch.cat([parts[:, span] for span in kind.spans], dim=1).view(-1)
            mine = await self._run(self.inner.scatter(_part(bucket, kind, flat)))
            _put_back(mine, kind.spans, answer)
        return answer

    def _kinds(self, layout: tuple[Any, ...], parts: int) -> Iterator[_Kind]:
        """``parts``: in how many a slot of the layout is cut."""
        for name, wanted in (("copies", False), ("pieces", True)):
            slots, spans, start = [], [], 0
            for slot, piece in zip(layout, self.pieces, strict=True):
                stop = start + slot.numel // parts
                if piece == wanted:
                    slots.append(slot)
                    spans.append(slice(start, stop))
                start = stop
            if slots:
                yield _Kind(name, Layout(slots), spans)

    async def _run(self, coroutine: Any) -> Any:
        return await intercept(coroutine, _pass_on, self._refuse)

    async def _refuse(self, part: StepSum) -> Tensor:
        raise InvalidValue(
            f"{type(self.inner).__name__} needs a sum over the whole gradient, and with tensor parallelism "
            "ranks have copies of some parameters and pieces of others; use a strategy that works bucket by "
            "bucket"
        )


async def _pass_on(request: Any) -> object:
    return await request


def _part(bucket: Bucket, kind: _Kind, flat: Tensor) -> Bucket:
    scratch = None if bucket.scratch is None else bucket.scratch.part(kind.name)
    return replace(bucket, flat=flat, layout=kind.layout, scratch=scratch)


def _put_back(answer: Tensor, spans: list[slice], into: Tensor) -> None:
    start = 0
    for span in spans:
        stop = start + span.stop - span.start
        into[span] = answer[start:stop]
        start = stop
