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


@dataclass
class ClippedMean(gl.Strategy):
    """The mean of gradients, each of which is clipped as a whole, over all buckets."""

    norm: float = 1.0

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        square = await gl.step_sum(bucket.flat.double().square().sum())
        scale = (self.norm / square.sqrt().clamp(min=1e-30)).clamp(max=1.0)
        return gl.Reduced(await gl.all_reduce(bucket.flat.mul_(scale.to(bucket.flat.dtype))))


@gl.strategy_from
async def largest(bucket):
    return await gl.all_reduce(bucket.flat, op="max")


def weight_of_rank(bucket: gl.Bucket) -> float:
    return 1.0 + bucket.rank


def median(rows: torch.Tensor) -> torch.Tensor:
    """An aggregate as a user would write it; torch's median is the lower one of two."""
    return rows.median(0).values


@dataclass(frozen=True)
class Clipped:
    """An aggregate with an option: the mean of what is cut off at a limit."""

    limit: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clamp_(-self.limit, self.limit).mean(0)


STRATEGIES: dict[str, Callable[[], gl.Strategy]] = {
    "mean": gl.Mean,
    "fp16": lambda: gl.Cast(gl.Mean(), torch.float16),
    "bf16": lambda: gl.Cast(gl.Mean(), torch.bfloat16),
    "weighted": lambda: gl.WeightedMean(weight_of_rank),
    "weighted bf16": lambda: gl.Cast(gl.WeightedMean(weight_of_rank), torch.bfloat16),
    "weighted fp16": lambda: gl.Cast(gl.WeightedMean(weight_of_rank), torch.float16),
    "weighted int8": lambda: gl.WeightedMean(weight_of_rank, gl.Sharded(gl.Int8(block=32))),
    "weighted with a largest share": lambda: gl.WeightedMean(weight_of_rank, max_share=1.0),
    "weighted feedback": lambda: gl.WeightedMean(
        weight_of_rank, gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))), max_share=1.0
    ),
    "private, no noise": lambda: gl.Private(gl.Mean(), clip=100.0, noise_multiplier=0.0),
    "private bf16, no noise": lambda: gl.Private(
        gl.Cast(gl.Mean(), torch.bfloat16), clip=100.0, noise_multiplier=0.0
    ),
    "private powersgd, no noise": lambda: gl.Private(
        gl.PowerSGD(1, min_compression_rate=1), clip=100.0, noise_multiplier=0.0
    ),
    "auto, as in a script": lambda: gl.Auto(
        among=[
            gl.Cast(gl.Mean(), torch.bfloat16),
            gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))),
            gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=1)),
        ],
        replay={
            1: "ErrorFeedback(Sharded(Int4(block=32)))",
            2: "ErrorFeedback(PowerSGD(1, min_compression_rate=1))",
            4: "Cast(Mean(), bfloat16)",
            6: "ErrorFeedback(Sharded(Int4(block=32)))",
        },
    ),
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
    "hierarchical": lambda: gl.Hierarchical(gl.Mean()),
    "hierarchical bf16": lambda: gl.Hierarchical(gl.Mean(), inner=gl.Cast(gl.Mean(), torch.bfloat16)),
    "hierarchical int8 inside": lambda: gl.Hierarchical(gl.Mean(), inner=gl.Sharded(gl.Int8(block=32))),
    "hierarchical int4": lambda: gl.Hierarchical(gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32)))),
    "hierarchical top-k": lambda: gl.Hierarchical(gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1)))),
    "hierarchical powersgd": lambda: gl.Hierarchical(
        gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=1))
    ),
    "hierarchical rule": lambda: gl.Hierarchical(gl.Combined(gl.GeometricMedian())),
    "hierarchical by name": lambda: gl.Hierarchical(
        gl.Route({"*.bias": gl.Mean()}, gl.ErrorFeedback(gl.Gathered(gl.Sign(block=32))))
    ),
    "hierarchical clipped": lambda: gl.Hierarchical(ClippedMean()),
    "hierarchical cast": lambda: gl.Cast(gl.Hierarchical(gl.Mean()), torch.bfloat16),
    "weighted hierarchical": lambda: gl.WeightedMean(
        weight_of_rank, gl.Hierarchical(gl.ErrorFeedback(gl.Sharded(gl.Int8(block=32))))
    ),
    "clipped": ClippedMean,
    "clipped bf16": lambda: gl.Cast(ClippedMean(), torch.bfloat16),
    "int8": lambda: gl.Gathered(gl.Int8()),
    "int8 sharded": lambda: gl.Sharded(gl.Int8(block=32)),
    "int4 stochastic rotated": lambda: gl.Sharded(gl.Int4(block=32, rounding="stochastic", rotate=True)),
    "int4 feedback": lambda: gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))),
    "int2 feedback bf16": lambda: gl.ErrorFeedback(gl.Gathered(gl.Int2(block=32)), torch.bfloat16),
    "int4 decay": lambda: gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32)), decay=0.95),
    "1-bit": lambda: gl.ErrorFeedback(gl.Sharded(gl.Sign(block=32))),
    "1-bit, wider answers": lambda: gl.ErrorFeedback(
        gl.Sharded(gl.Sign(block=64, rotate=True), answer=gl.Int2(block=96))
    ),
    "fp8": lambda: gl.Sharded(gl.Fp8(block=32)),
    "natural": lambda: gl.Gathered(gl.Natural()),
    "top-k": lambda: gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1))),
    "top-k sharded": lambda: gl.ErrorFeedback(gl.Sharded(gl.TopK(0.1))),
    "chunk top-k": lambda: gl.ErrorFeedback(gl.Gathered(gl.ChunkTopK(0.1))),
    "chunk top-k sharded": lambda: gl.ErrorFeedback(gl.Sharded(gl.ChunkTopK(0.1, value="bfloat16"))),
    "random-k": lambda: gl.ErrorFeedback(gl.Summed(gl.RandomK(0.1))),
    "raw summed": lambda: gl.Summed(gl.Raw()),
    "raw sharded": lambda: gl.Sharded(gl.Raw()),
    "raw gathered median": lambda: gl.Gathered(gl.Raw(), median),
    "int8 sharded median": lambda: gl.Sharded(gl.Int8(block=32), median),
    "int4 clipped feedback": lambda: gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32), Clipped(2.0))),
    "median": lambda: gl.Combined(gl.Median()),
    "median int8": lambda: gl.Combined(gl.Median(), gl.Int8(block=32)),
    "median int4 feedback": lambda: gl.ErrorFeedback(gl.Combined(gl.Median(), gl.Int4(block=32))),
    "median sharded": lambda: gl.Sharded(gl.Raw(), gl.Median()),
    "aggregate of one's own": lambda: gl.Combined(median),
    "multi-krum": lambda: gl.Combined(gl.MultiKrum(0, m=1)),
    "geometric median": lambda: gl.Combined(gl.GeometricMedian()),
    "geometric median bf16": lambda: gl.Combined(gl.GeometricMedian(), gl.Raw("bfloat16")),
    "geometric median int4 feedback": lambda: gl.ErrorFeedback(
        gl.Combined(gl.GeometricMedian(), gl.Int4(block=32))
    ),
    "centered clipping": lambda: gl.Combined(gl.CenteredClipping(1.0)),
    "adasum": lambda: gl.Combined(gl.AdaSum()),
    "mixed": lambda: gl.Combined(gl.NNM(0, then=gl.Median()), watch=gl.Watch(patience=2)),
    "mixed twice": lambda: gl.Combined(gl.NNM(0, then=gl.NNM(0, then=gl.GeometricMedian()))),
    "momentum": lambda: gl.WorkerMomentum(gl.Combined(gl.Median())),
    "momentum int4 feedback": lambda: gl.WorkerMomentum(
        gl.ErrorFeedback(gl.Combined(gl.GeometricMedian(), gl.Int4(block=32))), beta=0.5
    ),
    "shared momentum": lambda: gl.SharedMomentum(gl.Mean()),
    "shared momentum by name": lambda: gl.SharedMomentum(gl.Mean(), {"a.*": 0.5, "*": 0.9}),
    "shared momentum 1-bit": lambda: gl.SharedMomentum(gl.ErrorFeedback(gl.Sharded(gl.Sign(block=32)))),
    "some by a rule": lambda: gl.Route({"*.bias": gl.Mean()}, otherwise=gl.Combined(gl.GeometricMedian())),
    "nesterov": gl.Nesterov,
    "nesterov without momentum": lambda: gl.Nesterov(
        gl.Cast(gl.Mean(), torch.bfloat16), lr=0.5, momentum=0.0
    ),
    "nesterov int4 feedback": lambda: gl.Nesterov(
        gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))), lr=0.1, momentum=0.9
    ),
    "sparseloco": lambda: gl.Nesterov(
        gl.ErrorFeedback(gl.Gathered(gl.ChunkTopK(0.1)), decay=0.95), lr=0.7, momentum=0.0
    ),
    "nesterov private, no noise": lambda: gl.Nesterov(
        gl.Private(gl.Mean(), clip=100.0, noise_multiplier=0.0)
    ),
    "private nesterov, no noise": lambda: gl.Private(
        gl.Nesterov(gl.PowerSGD(1, min_compression_rate=1)), clip=100.0, noise_multiplier=0.0
    ),
    "ef21": lambda: gl.EF21(gl.Gathered(gl.TopK(0.2))),
    "ef21 sharded": lambda: gl.EF21(gl.Sharded(gl.Int4(block=32))),
    "dgc": lambda: gl.DGC(0.1, clip=1.0, warmup=5),
    "powersgd": lambda: gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=1)),
    "powersgd twice, cold": lambda: gl.PowerSGD(2, min_compression_rate=0, iterations=2, warm_start=False),
    "powersgd by name, bf16 memory": lambda: gl.ErrorFeedback(
        gl.PowerSGD({"a.*": 1}, min_compression_rate=1), torch.bfloat16
    ),
    "powersgd bf16": lambda: gl.ErrorFeedback(
        gl.Cast(gl.PowerSGD(1, min_compression_rate=1), torch.bfloat16)
    ),
    "powersgd of buckets": lambda: gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=0, view="bucket")),
    "acpsgd": lambda: gl.ErrorFeedback(gl.AcpSGD(1, min_compression_rate=1)),
    "acpsgd bf16": lambda: gl.ErrorFeedback(gl.Cast(gl.AcpSGD(1, min_compression_rate=1), torch.bfloat16)),
    "acpsgd, bf16 memory": lambda: gl.ErrorFeedback(gl.AcpSGD(1, min_compression_rate=1), torch.bfloat16),
    "powersgd decay, bf16 memory": lambda: gl.ErrorFeedback(
        gl.PowerSGD(1, min_compression_rate=1), torch.bfloat16, decay=0.8
    ),
    "bf16 feedback": lambda: gl.ErrorFeedback(gl.Cast(gl.Mean(), torch.bfloat16)),
    "bf16 decay": lambda: gl.ErrorFeedback(gl.Cast(gl.Mean(), torch.bfloat16), decay=0.5),
    "raw bf16 feedback": lambda: gl.ErrorFeedback(gl.Sharded(gl.Raw("bfloat16"))),
    "ef21 powersgd": lambda: gl.EF21(gl.PowerSGD(1, min_compression_rate=1)),
}
"""``Noop`` is not among them: it is the one strategy that leaves replicas different. ``Private`` has no noise
here: with it no run is like another, and test_private.py has laws for that."""

OF_WEIGHTS: dict[str, Callable[[], gl.Strategy]] = {
    "local steps": lambda: gl.LocalSteps(gl.Mean(), every=4),
    "local steps int4": lambda: gl.LocalSteps(gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))), every=4),
    "local steps by name": lambda: gl.LocalSteps(
        gl.Route({"*.bias": gl.Mean()}, gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=1))),
        every=8,
        warmup=3,
        fragments=2,
        delay=1,
        blend=0.5,
        buffers="own",
    ),
    "local steps, int8 first": lambda: gl.LocalSteps(
        gl.Nesterov(gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32)))),
        every=4,
        warmup=2,
        first=gl.Sharded(gl.Int8(block=32)),
        moments="frozen",
    ),
}
"""Those whose buckets hold weights: ``local_steps`` takes them, and ``attach`` does not."""

EVERY = STRATEGIES | OF_WEIGHTS
"""All of them, for laws in the simulation."""

WITH_FEEDBACK = (
    "int4 feedback",
    "int2 feedback bf16",
    "int4 decay",
    "1-bit",
    "1-bit, wider answers",
    "top-k",
    "top-k sharded",
    "chunk top-k",
    "chunk top-k sharded",
    "random-k",
    "powersgd",
    "powersgd by name, bf16 memory",
    "acpsgd, bf16 memory",
    "powersgd bf16",
    "powersgd of buckets",
    "acpsgd",
    "acpsgd bf16",
    "powersgd decay, bf16 memory",
    "bf16 feedback",
    "bf16 decay",
    "raw bf16 feedback",
)
"""Those with error feedback (EF14)."""


def decayed(strategy: gl.ErrorFeedback, name: str) -> torch.Tensor | float:
    """What the last step has taken off the residual of a parameter: the memory holds what remains."""
    if strategy.decay == 1:
        return 0.0
    return strategy.memory.state_dict()[name].double() * (1 / strategy.decay - 1)


MEANS = ("mean", "fp16", "bf16", "after", "gathered", "gathered bf16", "sharded", "node first", "raw summed",
         "raw sharded", "hierarchical", "hierarchical bf16", "hierarchical cast")  # fmt: skip
"""Those that aim at the plain mean."""
