"""In a steady state a strategy allocates nothing of a gradient's size."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradlane as gl
from gradlane.core.collectives import Request, StepSum
from gradlane.core.running import Running, step_total
from gradlane.core.scratch import Scratch
from gradlane.simulate.answers import exchange

NUMEL = 200_000


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Allocations(TorchDispatchMode):
    """Bytes of new storages, where they are more than a hundredth of the gradient's."""

    def __init__(self):
        super().__init__()
        self.large = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        old = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in old:
                size = tensor.untyped_storage().nbytes()
                if size > 4 * NUMEL / 100:
                    self.large.append((str(function), size))
        return out


def step(strategies, scratches, number):
    """Two ranks in turn, with buffers that stay, as a lane has them."""
    layout = (gl.Slot("b", torch.Size([NUMEL // 2])), gl.Slot("w", torch.Size([NUMEL // 400, 200])))
    flats = [torch.randn(NUMEL) for _ in strategies]
    ranks = []
    allocations = Allocations()
    for rank, (strategy, scratch) in enumerate(zip(strategies, scratches, strict=True)):
        bucket = gl.Bucket(flats[rank], layout, number, rank, len(strategies), scratch=scratch)
        ranks.append(Running(strategy, bucket, lambda bucket, note: None))
    answers = [None] * len(ranks)
    while not isinstance(ranks[0].state, gl.Reduced):
        with allocations:
            states = [running.resume(answer) for running, answer in zip(ranks, answers, strict=True)]
        if isinstance(states[0], StepSum):
            answers = [step_total([running]) for running in ranks]
        elif isinstance(states[0], Request):
            answers = exchange(states, [running.bucket for running in ranks])
    return allocations.large


@pytest.mark.parametrize(
    "text",
    [
        "Mean()",
        "Cast(Mean(), bfloat16)",
        "Sharded(Int8())",
        "ErrorFeedback(Sharded(Int8()))",
        "ErrorFeedback(Sharded(Int4()))",
        "ErrorFeedback(Sharded(Int2()))",
        "ErrorFeedback(Sharded(Sign()))",
        "ErrorFeedback(Sharded(Fp8()))",
        "ErrorFeedback(Gathered(TopK(0.01)))",
        "ErrorFeedback(Summed(RandomK(0.01)))",
        "WeightedMean(2.0)",
        "WeightedMean(2.0, ErrorFeedback(Sharded(Int8())), max_share=0.5)",
        "Private(Mean(), 1.0, 1.0)",
        "Combined(Median())",
        "Combined(TrimmedMean(0), Int8())",
        "Combined(GeometricMedian())",
        "Combined(NNM(0, then=TrimmedMean(0)))",
        "Combined(NNM(0, then=MultiKrum(0)))",
        "ErrorFeedback(Combined(CenteredClipping(), Int8()))",
        "Sharded(Raw(), Median())",
        "ErrorFeedback(PowerSGD(4))",
        "ErrorFeedback(PowerSGD(4, iterations=2))",
        "ErrorFeedback(AcpSGD(4))",
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_nothing_large_is_allocated_after_the_first_steps(text, world, compiled_kernels):
    strategies, scratches = [gl.parse(text) for _ in range(world)], [Scratch() for _ in range(world)]
    for number in (0, 1):  # AcpSGD sends another factor in the second
        step(strategies, scratches, number)
    assert step(strategies, scratches, 2) == []


@pytest.fixture
def compiled_kernels():
    from gradlane.kernels.native import native_for

    if native_for(torch.empty(1)) is None:
        pytest.skip("the kernels are not compiled here; torch's own operations allocate")


def test_the_count_would_see_it():
    class Wasteful(gl.Strategy):
        async def reduce(self, bucket):
            return gl.Reduced(await gl.all_reduce(bucket.flat.clone()))

    assert [size for _, size in step([Wasteful()] * 2, [Scratch(), Scratch()], 1)] == [4 * NUMEL] * 2
