"""Three ways to carry encoded gradients: summed on the wire, gathered by all, or reduced shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate.combine import Aggregate, check_aggregate, combined
from ..aggregate.mean import mean
from ..codecs.base import Codec
from ..core.bucket import Bucket, layout_digest
from ..core.collectives import Payload, all_gather, all_reduce, all_to_all
from ..core.memory import Memory
from ..core.pack import message_size, payload_in
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, WrongType

SALT = 0x5EED  # of the seeds; a second encoding has the next
Sent = Callable[[], Tensor]


@dataclass
class Summed(Strategy):
    """Payloads of a linear codec, summed by an all-reduce."""

    codec: Codec
    settles: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = _checked(self.codec, "Summed")
        if not self.codec.linear:
            raise InvalidValue(
                f"payloads of {name} cannot be summed on the wire; "
                f"write Sharded({name}()) or Gathered({name}())"
            )

    async def reduce(self, bucket: Bucket) -> Reduced:
        codec, seed = self.codec, bucket.seed(SALT, shared=True)
        _refuse_sparse(bucket, "Summed")
        payload = _encoded(codec, bucket, bucket.flat, bucket.owed, seed, "summed")
        kept = _kept(bucket, [payload], seed)
        total = tuple([await all_reduce(part, op="mean") for part in payload])
        flat = codec.decode(total, bucket.flat, seed)
        return Reduced(flat, _sent(codec, flat, flat.numel(), kept))


@dataclass
class Gathered(Strategy):
    """Every rank's payload to every rank, which decodes them all: n - 1 payloads sent by each.

    ``aggregate`` makes one row of all ranks' rows, here and in ``Sharded``; the mean, unless said otherwise.
    Only the mean honours ``join(divide_by_initial_world_size=False)``: to any other, a rank that has
    joined is a row of zeros.
    """

    codec: Codec
    aggregate: Aggregate = mean
    settles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checked(self.codec, "Gathered")
        check_aggregate(self.aggregate, "Gathered")

    async def reduce(self, bucket: Bucket) -> Reduced:
        codec, seed = self.codec, bucket.seed(SALT, shared=False)
        _refuse_sparse(bucket, "Gathered")
        payload = _encoded(codec, bucket, bucket.flat, bucket.owed, seed, "gathered")
        kept = _kept(bucket, [payload], seed)
        everyone = await all_gather(payload)
        seeds = [bucket.seed(SALT, shared=False, rank=rank) for rank in range(len(everyone))]
        flat = _decoded(codec, self.aggregate, bucket, everyone, seeds, bucket.flat)
        return Reduced(flat, _sent(codec, flat, flat.numel(), kept))


@dataclass
class Sharded(Strategy):
    """Each rank reduces a shard: all-to-all, decode and combine in fp32, encode once, all-gather.

    Sends 2 (n - 1) / n payloads, whatever n is; a gradient is encoded twice on its way. With two ranks it is
    ``Gathered``: the same bytes in one exchange, and one loss instead of two. ``server_feedback`` keeps
    what the second encoding loses of this rank's shard and adds it in the next step (Tang et al., 2019,
    "DoubleSqueeze").
    """

    codec: Codec
    aggregate: Aggregate = mean
    server_feedback: bool = False
    server: Memory | None = None
    settles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checked(self.codec, "Sharded")
        check_aggregate(self.aggregate, "Sharded")
        if self.server is None:
            self.server = Memory(torch.float32)

    async def reduce(self, bucket: Bucket) -> Reduced:
        if bucket.world <= 2:
            return await Gathered(self.codec, self.aggregate).reduce(bucket)
        _refuse_sparse(bucket, "Sharded")
        codec, seed = self.codec, bucket.seed(SALT, shared=False)
        size = shard_size(bucket.flat.numel(), bucket.world, codec.granularity)
        shards = _cut(bucket.flat, size, bucket.world)
        owed = [None] * bucket.world if bucket.owed is None else _cut(bucket.owed, size, bucket.world)
        payloads = [
            _encoded(codec, bucket, shard, debt, seed + place, f"shard {place}")
            for place, (shard, debt) in enumerate(zip(shards, owed, strict=True))
        ]
        kept = _kept(bucket, payloads, seed)
        received = await all_to_all(payloads)
        mine = self._reduced(bucket, received, size, shards[bucket.rank].numel())
        everyone = await all_gather(mine)
        for place, (shard, payload) in enumerate(zip(shards, everyone, strict=True)):
            self._read(bucket, payload, shard, size, bucket.seed(SALT + 1, shared=False, rank=place))
        return Reduced(bucket.flat, _sent(codec, bucket.flat, size, kept))

    def _reduced(self, bucket: Bucket, received: Sequence[Payload], size: int, filled: int) -> Payload:
        """This rank's shard, combined and encoded again. On the wire shards are as long as the longest."""
        total = bucket.empty("shard sum", size, torch.float32)
        total[filled:].zero_()
        seeds = [bucket.seed(SALT, shared=False, rank=rank) + bucket.rank for rank in range(bucket.world)]
        _decoded(self.codec, self.aggregate, bucket, received, seeds, total[:filled])
        seed = bucket.seed(SALT + 1, shared=False)
        debt = self._owed_by_server(bucket, total) if self.server_feedback else None
        return _encoded(self.codec, bucket, total, debt, seed, "shard mean")

    def _owed_by_server(self, bucket: Bucket, total: Tensor) -> Tensor:
        """Of this rank's shard alone. DDP's new buckets, after its first step, are new shards: from 0 on."""
        assert self.server is not None
        name = f"shard {bucket.rank} of {bucket.world}, {layout_digest(bucket.layout)}"
        kept = self.server.get(name)
        if kept is None or kept.shape != total.shape:
            kept = torch.zeros_like(total)
            self.server.put(name, kept)
        return kept

    def _read(self, bucket: Bucket, payload: Payload, shard: Tensor, size: int, seed: int) -> None:
        if shard.numel() == size:
            self.codec.decode(payload, shard, seed)
        else:  # the last shards may be shorter, or empty
            whole = bucket.empty("shard sum", size, torch.float32)
            shard.copy_(self.codec.decode(payload, whole, seed)[: shard.numel()])


def shard_size(numel: int, world: int, granularity: int) -> int:
    """Elements of a shard: equal parts, rounded up to whole blocks."""
    part = -(-numel // world)
    return -(-part // granularity) * granularity


def _cut(flat: Tensor, size: int, world: int) -> list[Tensor]:
    numel = flat.numel()
    return [flat[min(rank * size, numel) : min((rank + 1) * size, numel)] for rank in range(world)]


def _encoded(codec: Codec, bucket: Bucket, flat: Tensor, owed: Tensor | None, seed: int, use: str) -> Payload:
    layout = codec.layout(flat.numel())
    message = bucket.empty(use, message_size(layout), torch.uint8)  # in one piece, as it will be sent
    out = payload_in(message, layout)
    if owed is None:
        return codec.encode(flat, seed, out)
    return codec.encode_owed(flat, owed, seed, out)


def _decoded(
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
    world, numel = len(payloads), out.numel()
    rows = bucket.empty("rows", world * numel, torch.float32).view(world, numel)
    for row, payload, seed in zip(rows, payloads, seeds, strict=True):
        codec.decode(payload, row, seed)
    if numel and out.device.type != "meta":  # a dry run knows the shapes without asking
        out.copy_(combined(aggregate, rows))
    return out


def _sent(codec: Codec, flat: Tensor, size: int, kept: Sequence[tuple[Payload, int]] | None) -> Sent | None:
    """My contribution as the others saw it, decoded if somebody asks."""
    if kept is None:
        return None

    def decoded() -> Tensor:
        out = torch.empty_like(flat)
        for (payload, seed), piece in zip(kept, _cut(out, size, len(kept)), strict=True):
            codec.decode(payload, piece, seed)
        return out

    return decoded


def _kept(bucket: Bucket, payloads: Sequence[Payload], seed: int) -> list[tuple[Payload, int]] | None:
    """Copies, where feedback will ask for them: the wire may overwrite the payloads."""
    if not bucket.feedback:
        return None
    return [(tuple(part.clone() for part in payload), seed + n) for n, payload in enumerate(payloads)]


def _checked(codec: object, strategy: str) -> str:
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


def _refuse_sparse(bucket: Bucket, strategy: str) -> None:
    if bucket.flat.is_sparse:
        name = bucket.names[0]
        raise WrongType(
            f"{strategy} cannot encode the sparse gradient of {name!r}; give it a strategy of its own with "
            f"Route({{{name!r}: Mean()}}, otherwise={strategy}(...)), or use a dense embedding"
        )
