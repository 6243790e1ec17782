"""What every strategy obeys, over the one list of all strategies."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradlane as gl

from ..support.catalogue import (
    EVERY,
    MEANS,
    OF_WEIGHTS,
    Clipped,
    ClippedMean,
    GatheredMean,
    MajorityVote,
    NodeFirst,
    ShardedMean,
)
from ..support.grids import grid

everyone = pytest.mark.parametrize("name", EVERY)
UNWRITTEN = (
    *(name for name in EVERY if name.startswith("weighted")),
    *("function", "raw gathered median", "int8 sharded median", "aggregate of one's own"),
)
SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "scale": (), "b.weight": (3, 2, 2), "none": (0, 4)}


def gradients(world, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        for _ in range(world)
    ]


def simulation(name, world, **options):
    return gl.Simulation(EVERY[name](), world=world, node_size=2 if world % 2 == 0 else 1, **options)


@everyone
@pytest.mark.parametrize(
    ("world", "bucket_bytes"),
    grid([1, 2, 4, 5], [None, 64], quick=[(1, 64), (2, None), (4, 64), (5, None)]),
)
def test_ranks_are_bit_equal_and_keep_shape_and_dtype(name, world, bucket_bytes):
    ranks = simulation(name, world, bucket_bytes=bucket_bytes)
    for step in range(4):
        given_ = gradients(world, step)
        before = copy.deepcopy(given_)
        answers = ranks.step(given_)
        for answer, own in zip(answers, given_, strict=True):
            assert list(answer) == list(SHAPES)
            for key, value in answer.items():
                assert value.shape == own[key].shape
                assert value.dtype == own[key].dtype
                assert torch.equal(value, answers[0][key])
        for now, then in zip(given_, before, strict=True):
            assert all(torch.equal(now[key], then[key]) for key in now)


@everyone
@pytest.mark.parametrize(("world", "bucket_bytes"), grid([2, 4], [None, 64], quick=[(2, None), (4, 64)]))
def test_the_meta_trace_is_the_real_trace(name, world, bucket_bytes):
    ranks = simulation(name, world, bucket_bytes=bucket_bytes)
    for step in range(4):
        ranks.events.clear()
        ranks.step(gradients(world, step))
        # The steps of local training are an optimizer's; without a number it is a whole round.
        at, real = step, ranks.events
        if name in OF_WEIGHTS:
            at, real = None, [replace(event, step=0) for event in real]
        for strategy in (EVERY[name](), ranks.strategies[0]):  # a new one, and one with memory
            trace = gl.dry_run(strategy, SHAPES, world=world, step=at, bucket_bytes=bucket_bytes, node_size=2)
            assert list(trace.events) == real


@everyone
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_of_gradients(name, dtype):
    answers = simulation(name, 2).step(gradients(2, dtype=dtype))
    assert all(value.dtype == dtype for value in answers[0].values())


@everyone
def test_zeros_give_zeros(name):
    zeros = [{key: torch.zeros(shape) for key, shape in SHAPES.items()} for _ in range(2)]
    assert all(value.count_nonzero() == 0 for value in simulation(name, 2).step(zeros)[1].values())


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_means_are_the_mean(name, world):
    given_ = gradients(world)
    answer = simulation(name, world).step(given_)[0]
    for key, value in answer.items():
        exact = torch.stack([own[key].double() for own in given_]).mean(0)
        torch.testing.assert_close(value.double(), exact, rtol=2e-2, atol=1e-2)


OWN = {
    part.__name__: part for part in (MajorityVote, GatheredMean, ShardedMean, NodeFirst, ClippedMean, Clipped)
}


@everyone
@pytest.mark.parametrize("short", [False, True])
def test_the_text_form_reads_back_where_it_can_be_written(name, short):
    strategy = EVERY[name]()
    text = gl.describe(strategy, short=short)
    if "<" in text:  # a function of one's own; it is told by its name alone
        assert name in UNWRITTEN
    else:
        again = gl.parse(text, names=OWN)
        assert again == strategy
        assert gl.describe(again, short=short) == text


@everyone
@pytest.mark.parametrize("world", [2, 4])
def test_resume_equals_no_stop(name, world):
    whole, first, second = (simulation(name, world) for _ in range(3))
    expected = [whole.step(gradients(world, step)) for step in range(6)][-1]
    for step in range(3):
        first.step(gradients(world, step))
    second.steps = 3
    for old, new in zip(first.strategies, second.strategies, strict=True):
        new.load_state_dict(old.state_dict())
    answers = [second.step(gradients(world, step)) for step in range(3, 6)][-1]
    assert all(torch.equal(answers[1][key], expected[1][key]) for key in SHAPES)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shapes_any_numbers(data):
    shape = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    shapes = data.draw(
        st.dictionaries(st.text("abc.", min_size=1, max_size=4), shape, min_size=1, max_size=5)
    )
    world = data.draw(st.integers(1, 4))
    name = data.draw(st.sampled_from(["mean", "weighted", "gathered", "sharded", "route"]))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** data.draw(st.integers(-20, 20))
    given_ = [
        {key: torch.randn(shape, generator=generator) * scale for key, shape in shapes.items()}
        for _ in range(world)
    ]
    answers = gl.Simulation(EVERY[name](), world=world).step(given_)
    for answer in answers:
        assert all(torch.equal(answer[key], answers[0][key]) for key in shapes)
    if name in ("mean", "gathered", "sharded"):
        for key in shapes:
            exact = torch.stack([own[key].double() for own in given_]).mean(0)
            torch.testing.assert_close(answers[0][key].double(), exact, rtol=1e-5, atol=scale * 1e-6)
