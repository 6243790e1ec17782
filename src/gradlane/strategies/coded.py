"""What encoded exchanges share: encoding into a bucket's own buffers, cutting it into shards, what was
sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..aggregate.combine import Aggregate, combine_into
from ..aggregate.mean import mean
from ..aggregate.rule import Rule
from ..codecs.base import Codec
from ..core.bucket import Bucket
from ..core.collectives import Payload
from ..core.pack import message_size, payload_in
from ..core.strategy import Reduced, Strategy
from ..errors import WrongType

SALT = 0x5EED  # of the seeds; a second encoding has the next
Sent = Callable[[], Tensor]


class Shards:
    """A bucket in one part for each rank, which combines what all have sent it of that part."""

    def __init__(self, codec: Codec, bucket: Bucket) -> None:
        self._codec, self._bucket = codec, bucket
        self._seed = bucket.seed(SALT, shared=False)
        self._kept: list[tuple[Payload, int]] | None = None
        self._sound = False
        self.size = shard_size(bucket.flat.numel(), bucket.world, codec.granularity)
        """Of a shard on the wire: as long as the longest."""
        self._parts = _cut(bucket.flat, self.size, bucket.world)
        self.filled = self._parts[bucket.rank].numel()
        """Elements of this rank's own shard; the last ones may be shorter, or empty."""

    def encoded(self) -> list[Payload]:
        """What goes to each rank."""
        bucket = self._bucket
        owed, left = (self._debts(debt) for debt in (bucket.owed, bucket.owed_after))
        payloads = [
            encoded(self._codec, bucket, part, before, after, self._seed + place, f"shard {place}")
            for place, (part, before, after) in enumerate(zip(self._parts, owed, left, strict=True))
        ]
        self._kept = kept_for_feedback(bucket, payloads, self._seed)
        self._sound = all(map(self._codec.sound, payloads))
        return payloads

    def _debts(self, debt: Tensor | None) -> Sequence[Tensor | None]:
        world = self._bucket.world
        return [None] * world if debt is None else _cut(debt, self.size, world)

    def seeds(self) -> list[int]:
        """Those with which the ranks encoded what they sent to this one."""
        bucket = self._bucket
        return [bucket.seed(SALT, shared=False, rank=rank) + bucket.rank for rank in range(bucket.world)]

    def room(self) -> Tensor:
        """For this rank's answer: fp32, zeros beyond what is filled."""
        total = self._bucket.empty("shard sum", self.size, torch.float32)
        total[self.filled :].zero_()
        return total

    def answer(self, total: Tensor, owed: Tensor | None = None, left: Tensor | None = None) -> Payload:
        """This rank's shard, encoded for all; ``left`` takes the debt of the answer, or owed itself."""
        seed = self._bucket.seed(SALT + 1, shared=False)
        return encoded(self._codec, self._bucket, total, owed, left, seed, "shard mean")

    def reduced(self, everyone: Sequence[Payload], aggregate: Aggregate | None = None) -> Reduced:
        """All answers, read into the bucket; sound if nothing but a mean was taken of what is."""
        bucket = self._bucket
        for place, (part, payload) in enumerate(zip(self._parts, everyone, strict=True)):
            self._read(payload, part, bucket.seed(SALT + 1, shared=False, rank=place))
        sound = self._sound and aggregate is mean
        return Reduced(bucket.flat, sent_of(self._codec, bucket.flat, self.size, self._kept), sound)

    def _read(self, payload: Payload, part: Tensor, seed: int) -> None:
        if part.numel() == self.size:
            self._codec.decode(payload, part, seed)
        else:
            whole = self._bucket.empty("shard sum", self.size, torch.float32)
            part.copy_(self._codec.decode(payload, whole, seed)[: part.numel()])


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
    owed: Tensor | None,
    left: Tensor | None,
    seed: int,
    use: str,
) -> Payload:
    """The payload of flat, and of what is owed; ``left`` takes what is owed then, or owed itself."""
    layout = codec.layout(flat.numel())
    message = bucket.empty(use, message_size(layout), torch.uint8)  # in one piece, as it will be sent
    out = payload_in(message, layout)
    if owed is None:
        return codec.encode(flat, seed, out)
    return codec.encode_owed(flat, owed, seed, out, left)


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
    if isinstance(aggregate, Rule) and bucket.world > 1:
        aggregate.check(bucket.world)
    rows = decoded_rows(codec, bucket, payloads, seeds, out.numel())
    if rows.numel() and out.device.type != "meta":  # a dry run knows the shapes without asking
        lost = _unordered(rows) if isinstance(aggregate, Rule) else None
        combine_into(aggregate, rows, out)
        if lost is not None:
            out.masked_fill_(lost, torch.nan)
    return out


def _unordered(rows: Tensor) -> Tensor | None:
    """Columns with a NaN, which no order has a place for: a rule might answer anything. None: no such."""
    if not rows.sum().isnan():
        return None
    return rows.isnan().any(0)


def decoded_rows(
    codec: Codec, bucket: Bucket, payloads: Sequence[Payload], seeds: Sequence[int], numel: int
) -> Tensor:
    """What each rank sent, fp32 [world, numel]."""
    world = len(payloads)
    rows = bucket.empty("rows", world * numel, torch.float32).view(world, numel)
    for row, payload, seed in zip(rows, payloads, seeds, strict=True):
        codec.decode(payload, row, seed)
    return rows


def sent_of(codec: Codec, flat: Tensor, size: int, kept: Sequence[tuple[Payload, int]] | None) -> Sent | None:
    """My contribution as the others saw it, decoded if somebody asks."""
    if kept is None:
        return None

    def decoded() -> Tensor:
        out = torch.empty_like(flat)
        for (payload, seed), piece in zip(kept, _cut(out, size, len(kept)), strict=True):
            codec.decode(payload, piece, seed)
        return out

    return decoded


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
