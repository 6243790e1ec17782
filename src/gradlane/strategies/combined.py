"""Rules over ranks at the price of an all-reduce: each rank applies them to a shard of all gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate.combine import Aggregate, check_aggregate, check_rule
from ..aggregate.decision import Verdict, alone, judged
from ..aggregate.rule import GramRule, Rule
from ..aggregate.watch import Watch
from ..codecs.base import Codec
from ..codecs.raw import Raw
from ..core.bucket import Bucket
from ..core.collectives import all_gather, all_reduce, all_to_all, note, step_sum
from ..core.strategy import Reduced, Strategy
from ..errors import WrongType
from ..kernels.rows import inner_products
from .shards import Shards, checked_codec, refuse_sparse


@dataclass
class Combined(Strategy):
    """Gradients combined by a robust rule, or by any aggregate, without those that are not finite.

    All-to-all of shards, all-reduce of their inner products (8 n (n + 1) bytes, fp64), the rule on this
    rank's shard, all-gather: the bytes of a plain all-reduce. Rules for each element by itself decide
    bucket by bucket. Rules about whole vectors decide by the inner products of the whole step, so their
    answers wait for its last bucket; the larger part of the first exchange overlaps with backward all the
    same.

    A rank whose values are not finite is left out and named in a warning, and the rule has one wrong rank
    less to expect; one that has joined early is left out. If too few are left every rank raises; if nobody
    sent finite values the answer is NaN, as that of a mean would be. In the metrics:
    ``rank3_distance_norm``, ``rank3_weight``, ``rank3_excluded``. ``watch`` names a rank that stays far
    from the others. Alone, a rank gets its own gradient. Gradients of any width travel and are combined in
    fp32, or as the codec has it.
    """

    rule: Rule | Aggregate
    codec: Codec = field(default_factory=Raw)
    watch: Watch = field(default_factory=Watch)
    fuses_feedback: ClassVar[bool] = True
    encodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._judged: tuple[Tensor, Verdict] | None = None  # by the figures: all buckets of a step share them
        checked_codec(self.codec, "Combined")
        if not isinstance(self.rule, GramRule):
            check_aggregate(self.rule, "Combined")
        if not isinstance(self.watch, Watch):
            raise WrongType(f"watch is a {type(self.watch).__name__}; write watch=Watch(factor=3.0)")

    def check_world(self, world: int) -> None:
        check_rule(self.rule, world)

    async def reduce(self, bucket: Bucket) -> Reduced:
        refuse_sparse(bucket, "Combined")
        self.check_world(bucket.world)
        shards = Shards(self.codec, bucket)
        received = await all_to_all(shards.encoded())
        rows = shards.rows(received)
        seen = await all_reduce(_figures(bucket, rows), op="sum", exact=True)
        if isinstance(self.rule, GramRule):
            seen = await step_sum(seen, of=self)
        total = shards.room()
        if bucket.flat.device.type != "meta":
            verdict, first = self._verdict(bucket, seen)
            if first:
                await note(**verdict.figures())
            if rows.numel():
                verdict.answer(rows, total[: shards.filled], lambda numel: _room(bucket, numel))
        return shards.reduced(await all_gather(shards.answer(total)))

    def _verdict(self, bucket: Bucket, seen: Tensor) -> tuple[Verdict, bool]:
        """And whether it is a new one."""
        if self._judged is not None and self._judged[0] is seen:
            return self._judged[1], False
        figures = seen.cpu()
        verdict = alone(figures) if bucket.world == 1 else judged(self.rule, figures, bucket.step)
        blamed = verdict.broken if verdict.heard else ()  # if all overflow nobody is wrong
        self.watch.add(bucket.step, figures, blamed, bucket.rank)
        self._judged = (seen, verdict)
        return verdict, True


def _room(bucket: Bucket, numel: int) -> Tensor:
    return bucket.empty("mixed rows", numel, torch.float32)


def _figures(bucket: Bucket, rows: Tensor) -> Tensor:
    """Inner products of the ranks' shards, and in the last column who has joined."""
    world = bucket.world
    figures = torch.zeros(world, world + 1, dtype=torch.float64, device=rows.device)
    if rows.device.type != "meta":
        figures[:, :world] = inner_products(rows)
        figures[bucket.rank, world] = float(bucket.joined)
    return figures
