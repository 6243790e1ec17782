"""What encoded exchanges share: encoding into a bucket's own buffers, cutting it into shards, what was
sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..aggregate.combine import Aggregate, check_rule, combine_into
from ..aggregate.mean import mean
from ..aggregate.rule import Rule
from ..codecs.base import Codec, keep_finite
from ..codecs.raw import Raw
from ..core.bucket import Bucket
from ..core.collectives import Payload
from ..core.message import message_size, payload_in
from ..core.strategy import Reduced, Strategy
from ..errors import WrongType

SALT = 0x5EED  # of the seeds; a second encoding has the next
Sent = Callable[[], Tensor]
T = TypeVar("T")


class Shards:
    """A bucket in one part for each rank, which combines what all have sent it of that part.

    A rank's own shard stays at home, so it is not encoded and loses nothing there. What the answer's encoding
    loses of it is kept instead, where error feedback keeps the residual of this part: the memory of one
    gradient holds what both encodings lose. It is in the units of the others' residuals, those of a sum over
    the ranks, so that it may move to another shard, or another world, and count as much there.
    """

    def __init__(self, codec: Codec, bucket: Bucket, answer: Codec | None = None) -> None:
        self._codec, self._bucket = codec, bucket
        self._answer = answer or codec
        self._seed = bucket.seed(SALT, shared=False)
        self._kept: list[tuple[Payload, int]] | None = None
        self._own_sent: Tensor | None = None
        self._bounded = False
        whole = math.lcm(codec.granularity, self._answer.granularity)
        self.size = shard_size(bucket.flat.numel(), bucket.world, whole)
        """Of a shard on the wire: as long as the longest."""
        self._parts = _cut(bucket.flat, self.size, bucket.world)
        self._own = self._parts[bucket.rank]
        self.filled = self._own.numel()
        """Elements of this rank's own shard; the last ones may be shorter, or empty."""

    def encoded(self) -> list[Payload]:
        """What goes to each rank; to itself only room of the same shape."""
        bucket = self._bucket
        residual, residual_out = (self._residuals(flat) for flat in (bucket.residual, bucket.residual_after))
        payloads = [
            payload_room(self._codec, bucket, part.numel(), "own shard")
            if place == bucket.rank
            else encoded(self._codec, bucket, part, before, after, self._seed + place, f"shard {place}")
            for place, (part, before, after) in enumerate(
                zip(self._parts, residual, residual_out, strict=True)
            )
        ]
        self._kept = kept_for_feedback(bucket, payloads, self._seed)
        return payloads

    def _residuals(self, flat: Tensor | None) -> Sequence[Tensor | None]:
        world = self._bucket.world
        return [None] * world if flat is None else _cut(flat, self.size, world)

    def combined(self, received: Sequence[Payload], aggregate: Aggregate) -> Tensor:
        """This rank's shard of the answer, padded to the size of a shard."""
        bucket, total = self._bucket, self.room(self._wide())
        mine = total[: self.filled]
        if aggregate is mean:
            share = 1 / bucket.divisor()
            payloads, seeds = self._of_others(received), self._of_others(self._seeds())
            self._codec.decode_sum(payloads, mine, seeds, share)
            mine.add_(self._own, alpha=share)
        else:
            combine_rows(aggregate, bucket, self.rows(received), mine)
        return total

    def rows(self, received: Sequence[Payload]) -> Tensor:
        """What each rank gave of this rank's shard, fp32 [world, filled]."""
        rows = rows_room(self._bucket, self.filled)
        for place, (row, payload, seed) in enumerate(zip(rows, received, self._seeds(), strict=True)):
            if place != self._bucket.rank:
                self._codec.decode(payload, row, seed)
            elif isinstance(self._codec, Raw):
                row.copy_(self._own)
            else:  # an infinite value comes out of a codec as NaN; aggregates shall see no other here
                torch.mul(self._own, 0.0, out=row).add_(self._own)
        return rows

    def _seeds(self) -> list[int]:
        """Those with which the ranks encoded what they sent to this one."""
        bucket = self._bucket
        return [bucket.seed(SALT, shared=False, rank=rank) + bucket.rank for rank in range(bucket.world)]

    def _of_others(self, everyone: Sequence[T]) -> list[T]:
        return [one for place, one in enumerate(everyone) if place != self._bucket.rank]

    def room(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """For this rank's answer: zeros beyond what is filled."""
        total = self._bucket.empty("shard sum", self.size, dtype)
        total[self.filled :].zero_()
        return total

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._bucket.flat.dtype, torch.float32)

    def answer(self, total: Tensor) -> Payload:
        """This rank's shard, and the residual of earlier answers, encoded for all."""
        bucket = self._bucket
        seed = bucket.seed(SALT + 1, shared=False)
        if bucket.residual is None and not bucket.feedback:
            payload = encoded(self._answer, bucket, total, None, None, seed, "shard mean")
        else:
            payload = self._answer_with_feedback(total, seed)
        self._bounded = self._answer.bounded(payload)
        return payload

    def _answer_with_feedback(self, total: Tensor, seed: int) -> Payload:
        bucket, count = self._bucket, self._bucket.divisor()
        before, after = (
            self._residuals(flat)[bucket.rank] for flat in (bucket.residual, bucket.residual_after)
        )
        residual = bucket.empty("shard residual", self.size, self._wide()).zero_()
        mine = residual[: self.filled]
        if before is not None:
            mine.add_(before, alpha=1 / count)  # of the sum, where total is a mean
        if bucket.feedback:
            self._own_sent = torch.add(self._own, mine, alpha=count)
        payload = encoded(self._answer, bucket, total, residual, None, seed, "shard mean")
        mine.mul_(count)
        if after is not None:
            after.copy_(mine)
            if after.device.type != "meta":
                keep_finite(after)
        if self._own_sent is not None:
            self._own_sent.sub_(mine)
        return payload

    def reduced(self, everyone: Sequence[Payload]) -> Reduced:
        """All answers, read into the bucket. Each rank vouches for its own."""
        bucket = self._bucket
        for place, (part, payload) in enumerate(zip(self._parts, everyone, strict=True)):
            self._read(payload, part, bucket.seed(SALT + 1, shared=False, rank=place))
        return Reduced(bucket.flat, self._sent(), self._bounded)

    def _sent(self) -> Sent | None:
        kept, own = self._kept, self._own_sent
        if kept is None or own is None:
            return None
        flat, rank, codec, size = self._bucket.flat, self._bucket.rank, self._codec, self.size

        def sent() -> Tensor:
            out = torch.empty_like(flat)
            for place, piece in enumerate(_cut(out, size, len(kept))):
                piece.copy_(own) if place == rank else codec.decode(kept[place][0], piece, kept[place][1])
            return out

        return sent

    def _read(self, payload: Payload, part: Tensor, seed: int) -> None:
        if part.numel() == self.size:
            self._answer.decode(payload, part, seed)
        else:
            whole = self._bucket.empty("shard sum", self.size, self._wide())
            part.copy_(self._answer.decode(payload, whole, seed)[: part.numel()])


def shard_size(numel: int, world: int, granularity: int) -> int:
    """Elements of a shard: equal parts, rounded up to whole blocks."""
    part = -(-numel // world)
    return -(-part // granularity) * granularity


def _cut(flat: Tensor, size: int, world: int) -> list[Tensor]:
    numel = flat.numel()
    return [flat[min(rank * size, numel) : min((rank + 1) * size, numel)] for rank in range(world)]


def encoded(
    codec: Codec,
    bucket: Bucket,
    flat: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    seed: int,
    use: str,
) -> Payload:
    """The payload of flat, and of the residual; ``residual_out`` takes the new residual, or residual
    itself."""
    out = payload_room(codec, bucket, flat.numel(), use)
    if residual is None:
        return codec.encode(flat, seed, out)
    return codec.encode_with_feedback(flat, residual, seed, out, residual_out)


def payload_room(codec: Codec, bucket: Bucket, numel: int, use: str) -> Payload:
    """A payload of any content, in one piece, as it will be sent."""
    layout = codec.layout(numel)
    return payload_in(bucket.empty(use, message_size(layout), torch.uint8), layout)


def decoded(
    codec: Codec,
    aggregate: Aggregate,
    bucket: Bucket,
    payloads: Sequence[Payload],
    seeds: Sequence[int],
    out: Tensor,
) -> Tensor:
    """All payloads as one gradient. In rank order, so that all ranks get the same bits."""
    if aggregate is mean:
        total = out if out.dtype == torch.float32 else bucket.empty("wide sum", out.numel(), torch.float32)
        codec.decode_sum(payloads, total, seeds, 1 / bucket.divisor())
        return out if total is out else out.copy_(total)
    rows = rows_room(bucket, out.numel())
    for row, payload, seed in zip(rows, payloads, seeds, strict=True):
        codec.decode(payload, row, seed)
    combine_rows(aggregate, bucket, rows, out)
    return out


def combine_rows(aggregate: Aggregate, bucket: Bucket, rows: Tensor, out: Tensor) -> None:
    """What an aggregate makes of the ranks' rows."""
    check_rule(aggregate, bucket.world)
    if not rows.numel() or out.device.type == "meta":  # a dry run knows the shapes without asking
        return
    lost = _unordered(rows) if isinstance(aggregate, Rule) else None
    combine_into(aggregate, rows, out)
    if lost is not None:
        out.masked_fill_(lost, torch.nan)


def _unordered(rows: Tensor) -> Tensor | None:
    """Columns with a NaN, which no order has a place for: a rule might answer anything. None: no such."""
    if not rows.sum().isnan():
        return None
    return rows.isnan().any(0)


def rows_room(bucket: Bucket, numel: int) -> Tensor:
    """fp32 [world, numel], of any content."""
    return bucket.empty("rows", bucket.world * numel, torch.float32).view(bucket.world, numel)


def sent_of(codec: Codec, flat: Tensor, kept: Sequence[tuple[Payload, int]] | None) -> Sent | None:
    """My contribution as the others saw it, decoded if somebody asks."""
    if kept is None:
        return None
    ((payload, seed),) = kept
    return lambda: codec.decode(payload, torch.empty_like(flat), seed)


def kept_for_feedback(
    bucket: Bucket, payloads: Sequence[Payload], seed: int
) -> list[tuple[Payload, int]] | None:
    """Copies, where feedback will ask for them: the wire may overwrite the payloads."""
    if not bucket.feedback:
        return None
    return [(tuple(part.clone() for part in payload), seed + n) for n, payload in enumerate(payloads)]


def checked_codec(codec: object, strategy: str) -> str:
    if isinstance(codec, type) and issubclass(codec, Codec):
        raise WrongType(f"{strategy} got the class {codec.__name__}; write {strategy}({codec.__name__}())")
    if isinstance(codec, Strategy):
        name = type(codec).__name__
        raise WrongType(f"{strategy} takes a codec, and {name} is a strategy; write {strategy}(Int8()), say")
    if not isinstance(codec, Codec):
        raise WrongType(
            f"{strategy} takes a codec, got {type(codec).__name__}; write {strategy}(Int8()), say"
        )
    return type(codec).__name__


def refuse_sparse(bucket: Bucket, strategy: str) -> None:
    if bucket.flat.is_sparse:
        name = bucket.names[0]
        raise WrongType(
            f"{strategy} cannot encode the sparse gradient of {name!r}; give it a strategy of its own with "
            f"Route({{{name!r}: Mean()}}, otherwise={strategy}(...)), or use a dense embedding"
        )
