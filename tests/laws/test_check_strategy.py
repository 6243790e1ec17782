"""``check_strategy`` passes all that is in the library, and each of its laws can fail."""

import random
from dataclasses import dataclass, field

import pytest
import torch

import gradlane as gl
from gradlane.core.strategy import parts

from ..support.catalogue import (
    EVERY,
    Clipped,
    ClippedMean,
    GatheredMean,
    MajorityVote,
    NodeFirst,
    ShardedMean,
)
from ..support.grids import every

OWN = {
    part.__name__: part for part in (MajorityVote, GatheredMean, ShardedMean, NodeFirst, ClippedMean, Clipped)
}


@pytest.mark.parametrize("name", every(3, EVERY))
def test_all_of_the_library_keeps_the_laws(name):
    strategy = EVERY[name]()
    worlds = (4, 6) if any(part.uses_nodes for part in parts(strategy)) else (2, 3)
    assert gl.check_strategy(strategy, worlds=worlds, names=OWN) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_all_of_the_library_keeps_the_laws_at_any_number_of_ranks(name):
    assert gl.check_strategy(EVERY[name](), names=OWN) == []


async def mean_of(bucket):
    return await gl.all_reduce(bucket.flat)


@dataclass
class Base(gl.Strategy):
    memory: gl.Memory = field(default_factory=gl.Memory)


class Forgets(Base):
    async def reduce(self, bucket):
        return gl.Reduced(bucket.flat)


class OnlyAtThree(Base):
    """Right at two ranks."""

    async def reduce(self, bucket):
        own = bucket.rank if bucket.world > 2 else 0
        return gl.Reduced(await mean_of(bucket) + own)


class KeepsAnAnswer(Base):
    async def reduce(self, bucket):
        last = self.memory.get(bucket.names[0] + " last")
        everyone = [row for (row,) in await gl.all_gather((bucket.flat.clone(),))]
        mean = torch.stack(everyone).mean(0)
        self.memory.put(bucket.names[0] + " last", everyone[1 if bucket.rank == 0 else 0])
        return gl.Reduced(mean if last is None else mean + 0 * last)


class DrawsByItself(Base):
    async def reduce(self, bucket):
        noise = torch.full_like(bucket.flat, random.random())
        return gl.Reduced(await gl.all_reduce(bucket.flat + noise))


class LooksAtNumbers(Base):
    async def reduce(self, bucket):
        if bucket.flat.sum().item() > 1e9:
            return gl.Reduced(bucket.flat)
        return gl.Reduced(await mean_of(bucket))


class AsksWhatItKnows(Base):
    """What is asked for depends on what was kept, which a price cannot know."""

    async def reduce(self, bucket):
        known = self.memory.like(bucket).count_nonzero() if bucket.flat.device.type != "meta" else 0
        mean = await mean_of(bucket)
        self.memory.like(bucket).fill_(1.0)
        return gl.Reduced(await gl.all_reduce(mean) if known else mean)


class PlainAttribute(Base):
    async def reduce(self, bucket):
        if not hasattr(self, "momentum"):
            self.momentum = {}
        last = self.momentum.get(bucket.layout, torch.zeros_like(bucket.flat))
        mean = await mean_of(bucket)
        self.momentum[bucket.layout] = mean + 0.5 * last
        return gl.Reduced(self.momentum[bucket.layout].clone())


class HiddenAttribute(Base):
    async def reduce(self, bucket):
        mean = await mean_of(bucket)
        self._momentum = mean + 0.5 * getattr(self, "_momentum", torch.zeros(()))
        return gl.Reduced(self._momentum.clone())


class WrongNames(Base):
    """Its memory takes the names of parameters only."""

    async def reduce(self, bucket):
        mean = await mean_of(bucket)
        self.memory.put(f"bucket {bucket.index}", mean.clone())
        return gl.Reduced(mean)


class Counter:
    """A state of one's own, without keep and undo."""

    shared = True

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state.get("count", 0)

    def carried(self, saved, rank, world):
        return dict(saved[0])


@dataclass
class Counts(gl.Strategy):
    counter: Counter = field(default_factory=Counter)

    async def reduce(self, bucket):
        self.counter.count += 1
        return gl.Reduced(await mean_of(bucket))


class Listed(Counter):
    def state_dict(self):
        return {"count": [self.count]}

    def load_state_dict(self, state):
        self.count = state.get("count", [0])[0]


class Stays(Counter):
    carried = None

    def __init__(self):
        super().__init__()
        self.count = 1


class Unfair(Base):
    """Says that the others saw all of it, and sends half."""

    async def reduce(self, bucket):
        return gl.Reduced(await gl.all_reduce(bucket.flat * 0.5))


def with_memory(strategy, memory):
    strategy.memory = memory
    return strategy


class Halves(gl.Memory):
    def carried(self, saved, rank, world):
        return {name: value * 0.5 for name, value in super().carried(saved, rank, world).items()}


@dataclass
class Reads(gl.Strategy):
    """Takes an option, and turns it into another."""

    size: int = 1

    def __post_init__(self):
        self.size += 1

    async def reduce(self, bucket):
        return gl.Reduced(await mean_of(bucket))


BROKEN = [
    (Forgets(), "ranks get the same bits", "did reduce forget to await one"),
    (OnlyAtThree(), "ranks get the same bits", "never by a rank's own values"),
    (KeepsAnAnswer(gl.Memory(any_shape=True)), "ranks get the same bits", "Clone what you keep"),
    (DrawsByItself(), "two runs are the same", "bucket.seed"),
    (LooksAtNumbers(), "a dry run asks for the same", "the strategy looks at numbers"),
    (AsksWhatItKnows(), "a dry run asks for the same", "decide by shapes and steps"),
    (PlainAttribute(), "all state is saved", "PlainAttribute.momentum holds a tensor"),
    (PlainAttribute(), "a resumed run is the same", "after a stop in step 3"),
    (HiddenAttribute(), "a resumed run is the same", "after a stop in step 3"),
    (HiddenAttribute(), "an undone step leaves no trace", "after a step that was undone"),
    (WrongNames(), "a resumed run is the same", "does not belong to this model"),
    (Counts(Listed()), "a resumed run is the same", "a list in 'counter/count'"),
    (Counts(), "an undone step leaves no trace", "Counts.counter is not as before"),
    (Counts(Stays()), "other ranks can go on", "does not say what becomes of it"),
    (
        with_memory(gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1))), Halves(torch.float32)),
        "other ranks can go on",
        "is different with",
    ),
    (gl.ErrorFeedback(Unfair()), "nothing is lost", "away from the gradients"),
    (Reads(), "the text reads back", "reads as another strategy"),
]


@pytest.mark.parametrize(("strategy", "law", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_each_law_can_fail(strategy, law, message):
    findings = gl.check_strategy(strategy, worlds=(2, 3), names={"Reads": Reads})
    assert any(found.law == law and message in found.message for found in findings), list(map(str, findings))


def test_a_residual_of_ones_own():
    @dataclass
    class Half(Base):
        """Half of what there is goes out, half waits."""

        lost: float = 0.0

        async def reduce(self, bucket):
            residual = self.memory.like(bucket).add_(bucket.flat)
            sent = residual * 0.5
            residual.sub_(sent).mul_(1 - self.lost)
            return gl.Reduced(await gl.all_reduce(sent))

    assert gl.check_strategy(Half(), worlds=(2, 3), residual=lambda own: own.memory) == []
    (found,) = gl.check_strategy(Half(lost=0.1), worlds=(2, 3), residual=lambda own: own.memory)
    assert str(found).startswith("nothing is lost: world=2, 6 steps: what arrived of 'a.weight'")


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(gl.InvalidValue, match="check it with noise_multiplier=0"):
        gl.check_strategy("Private(Mean(), 1.0, 1.0)")
    with pytest.raises(gl.InvalidValue, match=r"refuses all of worlds=\(2, 3\)"):
        gl.check_strategy("Combined(Krum(1))", worlds=(2, 3))
    assert gl.check_strategy("Combined(Krum(1))", worlds=(2, 5)) == []
    with pytest.raises(gl.WrongType, match="not a strategy"):
        gl.check_strategy(3)


def test_it_is_left_as_it_was_and_takes_shapes_and_modules():
    strategy = gl.parse("ErrorFeedback(Sharded(Int4(block=32)))")
    module = torch.nn.Linear(5, 3)
    assert gl.check_strategy(strategy, module, worlds=(2, 3)) == []
    assert gl.check_strategy(strategy, {"w": (3, 3)}, worlds=(1,)) == []
    assert strategy.state_dict() == {}
