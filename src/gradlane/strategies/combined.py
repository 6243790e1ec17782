"""Robust rules at the cost of an all-reduce: each rank applies them to one shard of all gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate.combine import Aggregate, check_aggregate, check_rule
from ..aggregate.decision import Decision, decide, decide_alone
from ..aggregate.rule import GramRule, Rule
from ..aggregate.watch import Watch
from ..codecs.base import Codec
from ..codecs.raw import Raw
from ..core.bucket import Bucket
from ..core.collectives import all_gather, all_reduce, all_to_all, note, step_sum
from ..core.strategy import Reduced, Strategy
from ..errors import WrongType
from ..kernels.rows import inner_products
from .checks import check_codec, refuse_middle_of_few, refuse_sparse
from .shards import Shards


@dataclass
class Combined(Strategy):
    """Gradients combined by a robust rule, or by any aggregate, without those that are not finite.

    All-to-all of shards, all-reduce of their inner products (8 n (n + 1) bytes, fp64), the rule on this
    rank's shard, all-gather: the bytes of a plain all-reduce. Rules for each element by itself decide
    bucket by bucket. Rules about whole vectors decide by the inner products of the whole step, so their
    answers wait for its last bucket; the larger part of the first exchange overlaps with backward all the
    same.

    A rank with non-finite values is left out and named in a warning, and the rule expects one wrong rank
    less. A rank that has joined early is left out. If too few remain every rank raises; if nobody sent finite
    values the answer is NaN, as that of a mean would be. In the metrics: ``rank3_distance_norm``,
    ``rank3_weight``, ``rank3_excluded``. ``watch`` names a rank that stays far from the others. A single rank
    gets its own gradient. Gradients of any width travel and are combined in fp32, or as the codec says.
    """

    rule: Rule | Aggregate
    codec: Codec = field(default_factory=Raw)
    watch: Watch = field(default_factory=Watch)
    _latest: tuple[Tensor, Decision] | None = field(init=False, default=None, repr=False, compare=False)
    """The figures of a step and what they decide: all buckets of a step may share them."""
    fuses_feedback: ClassVar[bool] = True
    encodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_codec(self.codec, "Combined")
        if not isinstance(self.rule, GramRule):
            check_aggregate(self.rule, "Combined")
        refuse_middle_of_few(self.rule, self.codec, "Combined")
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
        total = shards.answer_buffer()
        if bucket.flat.device.type != "meta":
            decision, is_new = self._decision(bucket, seen)
            if is_new:
                await note(**decision.figures())
            if rows.numel():
                decision.combine(rows, total[: shards.filled], lambda numel: _buffer(bucket, numel))
        return shards.reduced(await all_gather(shards.answer(total)))

    def _decision(self, bucket: Bucket, seen: Tensor) -> tuple[Decision, bool]:
        """What the figures decide, and whether they are new: ``step_sum`` gives all buckets of a step the
        same tensor, and the step is counted once."""
        if self._latest is not None and self._latest[0] is seen:
            return self._latest[1], False
        figures = seen.cpu()
        decision = decide_alone(figures) if bucket.world == 1 else decide(self.rule, figures, bucket.step)
        blamed = decision.nonfinite if decision.included else ()  # if all overflow nobody is wrong
        self.watch.add(bucket.step, figures, blamed, bucket.rank)
        self._latest = (seen, decision)
        return decision, True


def _buffer(bucket: Bucket, numel: int) -> Tensor:
    return bucket.empty("mixed rows", numel, torch.float32)


def _figures(bucket: Bucket, rows: Tensor) -> Tensor:
    """Inner products of the ranks' shards, and in the last column who has joined."""
    world = bucket.world
    figures = torch.zeros(world, world + 1, dtype=torch.float64, device=rows.device)
    if rows.device.type != "meta":
        figures[:, :world] = inner_products(rows)
        figures[bucket.rank, world] = float(bucket.joined)
    return figures
