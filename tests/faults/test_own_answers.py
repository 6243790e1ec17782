"""A strategy of one's own may make numbers that are none of an answer that was fine: the step is skipped."""

from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.core.trust import is_our_own
from gradlane.local import run_ranks

from ..support.catalogue import MajorityVote, largest, median
from ..support.training import replicas_equal


@dataclass
class UnitNorm(gl.Strategy):
    """The direction of the mean: 0 / 0 where there is none."""

    async def reduce(self, bucket):
        mean = await gl.all_reduce(bucket.flat)
        return gl.Reduced(mean.div_(mean.norm()))


@dataclass
class UnitNormOfData(gl.Strategy):
    """The same, behind autograd's back."""

    async def reduce(self, bucket):
        mean = await gl.all_reduce(bucket.flat)
        mean.data.div_(mean.norm())
        return gl.Reduced(mean)


@dataclass
class UnitNormOf(gl.Strategy):
    """The same of what another strategy says, which it passes on with all that was said of it."""

    inner: gl.Strategy = field(default_factory=lambda: gl.Sharded(gl.Int8()))

    async def reduce(self, bucket):
        reduced = await self.inner.reduce(bucket)
        reduced.mean.div_(reduced.mean.norm())
        return reduced


@gl.strategy_from
async def unit_norm(bucket):
    mean = await gl.all_reduce(bucket.flat)
    return mean.div_(mean.norm())


class OwnCodec(gl.Int8):
    """It derives from one that can tell by its payload, and reads it in another way."""

    def _decode(self, payload, flat):
        super()._decode(payload, flat)
        flat.div_(flat.norm())


NORMED = {
    "in place": UnitNorm,
    "by data": UnitNormOfData,
    "of int8": UnitNormOf,
    "of a mean": lambda: UnitNormOf(gl.Mean()),
    "function": lambda: unit_norm,
    "cast": lambda: gl.Cast(UnitNorm(), torch.bfloat16),
    "routed": lambda: gl.Route({"weight": gl.Mean(), "bias": UnitNorm()}),
    "feedback": lambda: gl.ErrorFeedback(UnitNormOf(gl.Mean())),
}


def train(rank, strategy):
    """Whether each of four steps was skipped; the gradient of the third is 0."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    skipped = []
    with gl.attach(ddp, strategy, timeout=30) as attachment:
        for step in range(4):
            optimizer.zero_grad()
            (ddp(torch.randn(3, 8)) * (step != 2)).sum().backward()
            optimizer.step()
            skipped.append(attachment.skipped)
    return skipped, replicas_equal(ddp.parameters()), bool(ddp.module.weight.isfinite().all())


def all_of_them(rank):
    return {name: train(rank, make()) for name, make in NORMED.items()}


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_strategy_makes_in_place_is_looked_at(world):
    for found in run_ranks(all_of_them, world, deadline=120):
        for name, outcome in found.items():
            assert outcome == ([False, False, True, False], True, True), name


UNNAMED = """
class Unnamed(gl.Mean): ...
def unnamed(rows): return rows.mean(0)
"""


def test_only_strategies_of_the_library_are_taken_at_their_word():
    ours = [gl.Mean(), gl.ErrorFeedback(gl.Sharded(gl.Int8())), gl.Cast(gl.PowerSGD(2), torch.bfloat16)]
    ours += [gl.Route({"a": gl.DGC(0.1)}), gl.After(2, gl.Summed(gl.RandomK(0.1))), gl.WeightedMean(2.0)]
    assert all(map(is_our_own, ours))
    others = [MajorityVote(), largest, gl.Cast(MajorityVote(), torch.float16), gl.Gathered(gl.Int8(), median)]
    others += [gl.Route({"a": gl.Mean(), "b": UnitNorm()}), gl.ErrorFeedback(gl.Sharded(OwnCodec()))]
    exec(UNNAMED, made := {"gl": gl})  # as a notebook or a test of documentation may do
    others += [made["Unnamed"](), gl.Gathered(gl.Int8(), made["unnamed"])]
    assert not any(map(is_our_own, others))
