"""Every strategy, in one list: each law test runs over all of it. A new strategy adds a line here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import gradlane as gl


@dataclass
class MajorityVote(gl.Strategy):
    """signSGD with majority vote (Bernstein et al., 2018): a strategy as a user would write it."""

    step_size: float = 1e-3

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        votes = await gl.all_reduce(bucket.flat.sign().half(), op="sum")
        return gl.Reduced(votes.sign().to(bucket.flat.dtype) * self.step_size)


@dataclass
class GatheredMean(gl.Strategy):
    """The mean by an all-gather of two tensors of different width."""

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        flat = bucket.flat
        half = flat.numel() // 2
        everyone = await gl.all_gather((flat[half:].clone(), flat[:half].double()))
        mean = torch.stack([torch.cat([low.to(flat.dtype), high]) for high, low in everyone]).mean(0)
        return gl.Reduced(mean)


@dataclass
class ShardedMean(gl.Strategy):
    """The mean by an all-to-all of uneven shards and an all-gather: two phases."""

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        size = -(-bucket.flat.numel() // bucket.world)
        padded = torch.zeros(size * bucket.world, dtype=bucket.flat.dtype, device=bucket.flat.device)
        padded[: bucket.flat.numel()] = bucket.flat
        mine = await gl.all_to_all([(shard,) for shard in padded.view(bucket.world, size)])
        total = torch.stack([shard for (shard,) in mine]).mean(0)
        whole = torch.cat([shard for (shard,) in await gl.all_gather((total,))])
        return gl.Reduced(whole[: bucket.flat.numel()])


@dataclass
class NodeFirst(gl.Strategy):
    """A mean within each node, then across the nodes."""

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        flat = await gl.all_reduce(bucket.flat, over="node")
        return gl.Reduced(await gl.all_reduce(flat, over="cross"))


@gl.strategy_from
async def largest(bucket):
    return await gl.all_reduce(bucket.flat, op="max")


def weight_of_rank(bucket: gl.Bucket) -> float:
    return 1.0 + bucket.rank


STRATEGIES: dict[str, Callable[[], gl.Strategy]] = {
    "mean": gl.Mean,
    "fp16": lambda: gl.Cast(gl.Mean(), torch.float16),
    "bf16": lambda: gl.Cast(gl.Mean(), torch.bfloat16),
    "weighted": lambda: gl.WeightedMean(weight_of_rank),
    "weighted bf16": lambda: gl.Cast(gl.WeightedMean(weight_of_rank), torch.bfloat16),
    "after": lambda: gl.After(2, then=gl.Cast(gl.Mean(), torch.bfloat16)),
    "route": lambda: gl.Route(
        {"*.bias": gl.Mean(), "a.*": gl.Cast(gl.Mean(), torch.float16)}, MajorityVote()
    ),
    "function": lambda: largest,
    "vote": MajorityVote,
    "gathered": GatheredMean,
    "gathered bf16": lambda: gl.Cast(GatheredMean(), torch.bfloat16),
    "sharded": ShardedMean,
    "node first": NodeFirst,
    "int8": lambda: gl.Gathered(gl.Int8()),
    "int8 sharded": lambda: gl.Sharded(gl.Int8(block=32)),
    "int4 stochastic rotated": lambda: gl.Sharded(gl.Int4(block=32, rounding="stochastic", rotate=True)),
    "int4 feedback": lambda: gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))),
    "int2 feedback bf16": lambda: gl.ErrorFeedback(gl.Gathered(gl.Int2(block=32)), torch.bfloat16),
    "1-bit": lambda: gl.ErrorFeedback(gl.Sharded(gl.Sign(block=32), server_feedback=True)),
    "fp8": lambda: gl.Sharded(gl.Fp8(block=32)),
    "natural": lambda: gl.Gathered(gl.Natural()),
    "top-k": lambda: gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1))),
    "top-k sharded": lambda: gl.ErrorFeedback(gl.Sharded(gl.TopK(0.1))),
    "random-k": lambda: gl.ErrorFeedback(gl.Summed(gl.RandomK(0.1))),
    "raw summed": lambda: gl.Summed(gl.Raw()),
    "raw sharded": lambda: gl.Sharded(gl.Raw()),
    "ef21": lambda: gl.ErrorFeedback21(gl.Gathered(gl.TopK(0.2))),
    "ef21 sharded": lambda: gl.ErrorFeedback21(gl.Sharded(gl.Int4(block=32))),
    "dgc": lambda: gl.DGC(0.1, clip=1.0, warmup=5),
    "powersgd": lambda: gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=1)),
    "powersgd, as torch owes": lambda: gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=1, owes="mean")),
    "powersgd twice, cold": lambda: gl.PowerSGD(2, min_compression_rate=0, iterations=2, warm_start=False),
    "powersgd by name, bf16 memory": lambda: gl.ErrorFeedback(
        gl.PowerSGD({"a.*": 1}, min_compression_rate=1), torch.bfloat16
    ),
    "powersgd bf16": lambda: gl.ErrorFeedback(
        gl.Cast(gl.PowerSGD(1, min_compression_rate=1), torch.bfloat16)
    ),
    "powersgd of buckets": lambda: gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=0, view="bucket")),
    "powersgd within a budget": lambda: gl.ErrorFeedback(
        gl.PowerSGD(budget=0.95, every=4, min_compression_rate=0)
    ),
    "acpsgd": lambda: gl.ErrorFeedback(gl.AcpSGD(1, min_compression_rate=1)),
    "acpsgd bf16": lambda: gl.ErrorFeedback(gl.Cast(gl.AcpSGD(1, min_compression_rate=1), torch.bfloat16)),
    "bf16 feedback": lambda: gl.ErrorFeedback(gl.Cast(gl.Mean(), torch.bfloat16)),
}
"""``Noop`` is not among them: it is the one strategy that leaves replicas different."""

OWING = (
    "int4 feedback",
    "int2 feedback bf16",
    "1-bit",
    "top-k",
    "top-k sharded",
    "random-k",
    "powersgd",
    "powersgd, as torch owes",
    "powersgd by name, bf16 memory",
    "powersgd bf16",
    "powersgd of buckets",
    "powersgd within a budget",
    "acpsgd",
    "acpsgd bf16",
    "bf16 feedback",
)
"""Those with error feedback (EF14)."""

MEANS = ("mean", "fp16", "bf16", "after", "gathered", "gathered bf16", "sharded", "node first", "raw summed",
         "raw sharded")  # fmt: skip
"""Those that aim at the plain mean."""
