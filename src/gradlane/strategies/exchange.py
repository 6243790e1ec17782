"""Three ways to carry encoded gradients: summed on the wire, gathered by all, or reduced shard by shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..aggregate.combine import Aggregate, check_aggregate, check_rule
from ..aggregate.mean import mean
from ..codecs.base import Codec
from ..core.bucket import Bucket
from ..core.collectives import all_gather, all_reduce, all_to_all
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue
from .checks import check_codec, refuse_middle_of_few, refuse_sparse
from .encoding import SALT, copies_if_wanted, decoded, encoded, sent_of
from .shards import Shards


@dataclass
class Summed(Strategy):
    """Payloads of a linear codec, summed by an all-reduce."""

    codec: Codec
    fuses_feedback: ClassVar[bool] = True
    encodes: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_codec(self.codec, "Summed")
        if not self.codec.linear:
            name = type(self.codec).__name__
            raise InvalidValue(
                f"payloads of {name} cannot be summed on the wire; "
                f"write Sharded({name}()) or Gathered({name}())"
            )

    @property
    def averages(self) -> bool:
        return True

    async def reduce(self, bucket: Bucket) -> Reduced:
        codec, seed = self.codec, bucket.seed(SALT, shared=True)
        refuse_sparse(bucket, "Summed")
        payload = encoded(codec, bucket, bucket.flat, bucket.feedback, seed, "summed")
        bounded = codec.bounded(payload)  # now: the sum will overwrite it
        copies = copies_if_wanted(bucket, [payload], seed)
        total = tuple([await all_reduce(part, op="mean") for part in payload])
        flat = codec.decode(total, bucket.flat, seed)
        return Reduced(flat, sent_of(codec, flat, copies), bounded)


@dataclass
class Gathered(Strategy):
    """Every rank's payload to every rank, which decodes them all: n - 1 payloads sent by each.

    ``aggregate`` makes one row of all ranks' rows, here and in ``Sharded``; the default is the mean. Only the
    mean honours ``join(divide_by_initial_world_size=False)``: any other sees a joined rank as a row of zeros.
    """

    codec: Codec
    aggregate: Aggregate = mean
    fuses_feedback: ClassVar[bool] = True
    encodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_codec(self.codec, "Gathered")
        check_aggregate(self.aggregate, "Gathered")
        refuse_middle_of_few(self.aggregate, self.codec, "Gathered")

    @property
    def averages(self) -> bool:
        return self.aggregate is mean

    def check_world(self, world: int) -> None:
        check_rule(self.aggregate, world)

    async def reduce(self, bucket: Bucket) -> Reduced:
        codec, seed = self.codec, bucket.seed(SALT, shared=False)
        refuse_sparse(bucket, "Gathered")
        payload = encoded(codec, bucket, bucket.flat, bucket.feedback, seed, "gathered")
        copies = copies_if_wanted(bucket, [payload], seed)
        everyone = await all_gather(payload)
        seeds = [bucket.seed(SALT, shared=False, rank=rank) for rank in range(len(everyone))]
        flat = decoded(codec, self.aggregate, bucket, everyone, seeds, bucket.flat)
        bounded = self.aggregate is mean and codec.bounded(payload)
        return Reduced(flat, sent_of(codec, flat, copies), bounded)


@dataclass
class Sharded(Strategy):
    """Each rank reduces a shard: all-to-all, decode and combine in fp32, encode once, all-gather.

    A rank sends 2 (n - 1) / n payloads, whatever n is; a gradient is encoded twice on its way. Inside
    ``ErrorFeedback`` the rank that encodes a shard of the answer keeps what that encoding loses (the server's
    error of Tang et al., 2019, "DoubleSqueeze"), in the part of the memory that its own shard does not need.
    ``answer`` is the codec of the second encoding, by default that of the first: one bit is too little for
    both. With two ranks it is ``Gathered``: the same bytes in one exchange, and one loss instead of two.
    """

    codec: Codec
    aggregate: Aggregate = mean
    answer: Codec | None = None
    fuses_feedback: ClassVar[bool] = True
    encodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for codec in (self.codec, self.answer or self.codec):
            check_codec(codec, "Sharded")
        check_aggregate(self.aggregate, "Sharded")
        refuse_middle_of_few(self.aggregate, self.codec, "Sharded")

    @property
    def averages(self) -> bool:
        return self.aggregate is mean

    def check_world(self, world: int) -> None:
        check_rule(self.aggregate, world)

    async def reduce(self, bucket: Bucket) -> Reduced:
        if bucket.world <= 2:
            return await Gathered(self.codec, self.aggregate).reduce(bucket)
        refuse_sparse(bucket, "Sharded")
        shards = Shards(self.codec, bucket, self.answer)
        received = await all_to_all(shards.encoded())
        answer = shards.answer(shards.combined(received, self.aggregate))
        return shards.reduced(await all_gather(answer))

    @property
    def scatters(self) -> bool:
        return True

    async def scatter(self, bucket: Bucket) -> Tensor:
        refuse_sparse(bucket, "Sharded")
        shards = Shards(self.codec, bucket, size=bucket.flat.numel() // bucket.world)
        part = shards.combined(await all_to_all(shards.encoded()), self.aggregate)
        return part.to(bucket.flat.dtype)
