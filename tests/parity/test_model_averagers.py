"""torch's model averagers under their own names: which steps, which weights, and what happens to errors."""

import copy
import gc
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradlane as gl
from gradlane import compat
from gradlane.lane.base import join_ending_threads, open_lanes
from gradlane.local import run_ranks

from ..support.post_local import Theirs, gathered, periodic

# Which steps


def steps_that_average(rank, averagers):
    found = []
    for library, name, arguments in averagers:
        averager = getattr(Theirs if library == "torch" else compat, name)(*arguments)
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.zeros(1)  # torch leaves out what has none
        steps = []
        for step in range(23):
            weight.data.fill_(rank)
            averager.average_parameters([weight])
            if weight.item() != rank:
                steps.append((step, round(dist.get_world_size() * weight.item())))
        found.append(steps)
    return found


def test_both_averagers_begin_at_the_same_step():
    """With a warm-up of 10 and a period of 4. Beside each step: the sum of the ranks it averages over."""
    averagers = [
        ("torch", "PeriodicModelAverager", (4, 10)),
        ("torch", "HierarchicalModelAverager", (OrderedDict({4: 2}), 10)),
        ("ours", "PeriodicModelAverager", (4, 10)),
        ("ours", "HierarchicalModelAverager", (OrderedDict({4: 2}), 10)),
    ]
    for found in run_ranks(steps_that_average, 2, averagers):
        periodic, hierarchical, *ours = [[step for step, _ in steps] for steps in found]
        assert periodic == [10, 14, 18, 22]
        assert hierarchical == [12, 16, 20]
        assert ours == [periodic, periodic]


def test_of_several_periods_the_longest_counts():
    averagers = [("ours", "HierarchicalModelAverager", ({2: 2, 6: 4}, 5))]
    found = run_ranks(steps_that_average, 4, averagers)
    for rank, (steps,) in enumerate(found):
        pair = 4 * (0.5 if rank < 2 else 2.5)  # four times the mean
        assert steps == [(step, 6 if (step - 5) % 6 == 0 else pair) for step in range(5, 23, 2)]


def groups_of_levels(rank):
    averager = compat.HierarchicalModelAverager({2: 2, 6: 4})
    ranks = [dist.get_process_group_ranks(group) for group in averager.period_process_group_dict.values()]
    assert averager.process_group is dist.group.WORLD
    inside = dist.new_group([0, 1, 3])  # a group of some ranks: the others only count
    part = compat.PeriodicModelAverager(2, 0, inside)
    weight = torch.nn.Parameter(torch.tensor(float(rank)))
    for _ in range(3):
        part.average_parameters([weight])
    assert part.step == 3
    return ranks, round(weight.item(), 5)


def test_groups_of_the_levels_and_groups_of_some_ranks():
    found = run_ranks(groups_of_levels, 4)
    assert [ranks for ranks, _ in found] == [[[0, 1], [0, 1, 2, 3]]] * 2 + [[[2, 3], [0, 1, 2, 3]]] * 2
    assert [weight for _, weight in found] == [1.33333, 1.33333, 2.0, 1.33333]


# Which weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def weights_of(rank):
    generator = torch.Generator().manual_seed(rank)
    shapes = [(3, 5), (), (7,), (2, 3, 4, 5), (0, 3)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes for _ in DTYPES]
    found = [torch.nn.Parameter(w.to(DTYPES[i % len(DTYPES)])) for i, w in enumerate(drawn)]
    found[15] = torch.nn.Parameter(found[15].detach().to(memory_format=torch.channels_last))
    found[16].requires_grad = False
    return found


def ways_to_pass(weights):
    yield "list", weights
    yield "generator", (weight for weight in weights)
    yield "groups", [{"params": weights[:4], "lr": 0.1}, {"params": weights[4:]}]
    yield "twice", [*weights, *weights]


def every_dtype(rank, world):
    everyone = [weights_of(other) for other in range(world)]
    for name, _ in ways_to_pass([]):
        weights = weights_of(rank)
        storages = [weight.data_ptr() for weight in weights]
        view = weights[15].detach()[0]
        compat.PeriodicModelAverager(2).average_parameters(dict(ways_to_pass(weights))[name])
        assert [weight.data_ptr() for weight in weights] == storages
        assert torch.equal(view, weights[15].detach()[0])
        for i, weight in enumerate(weights):
            each = [theirs[i].detach() for theirs in everyone]
            if i == 16:  # it is frozen
                assert torch.equal(weight, each[rank])
                continue
            wide = torch.promote_types(weight.dtype, torch.float32)
            mean = sum(other.to(wide) / world for other in each).to(weight.dtype)
            if world == 2:  # a sum of two has one order
                assert torch.equal(weight, mean), (name, i)
            else:
                torch.testing.assert_close(weight.detach(), mean)
        flat = torch.cat(
            [torch.view_as_real(w.detach().to(torch.complex128)).flatten() for w in weights[:16]]
        )
        assert all(torch.equal(flat, other) for other in gathered(flat))
    return True


@pytest.mark.parametrize("world", [2, 3])
def test_weights_of_every_dtype_in_place(world):
    assert run_ranks(every_dtype, world, world) == [True] * world


def after_zero_grad(rank):
    """torch averages what has a gradient, and writes the mean into another storage."""

    def model():
        torch.manual_seed(rank)
        linear = torch.nn.Linear(3, 2)
        linear(torch.ones(1, 3)).sum().backward()
        return linear

    torchs = model()
    storage = torchs.weight.data_ptr()
    Theirs.PeriodicModelAverager(2).average_parameters(torchs.parameters())
    assert torchs.weight.data_ptr() != storage
    torchs.zero_grad()
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)non-empty"):
        Theirs.PeriodicModelAverager(2).average_parameters(torchs.parameters())

    ours = model()
    storage = ours.weight.data_ptr()
    if rank == 0:
        ours.zero_grad()  # torch would send tensors of different sizes
    compat.PeriodicModelAverager(2).average_parameters(ours.parameters())
    assert ours.weight.data_ptr() == storage
    return torch.equal(ours.weight, torchs.weight)


def test_gradients_do_not_matter():
    assert run_ranks(after_zero_grad, 2) == [True, True]


# Errors


def apart(rank):
    """Every error is raised by all ranks, leaves the weights alone, and can be mended."""
    weight = torch.nn.Parameter(torch.full((4,), float(rank)))
    averager = compat.PeriodicModelAverager(2)
    errors = []

    def average(averager, params):
        try:
            averager.average_parameters(params)
        except gl.GradlaneError as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert torch.equal(weight, torch.full((4,), float(rank)))

    average(compat.PeriodicModelAverager(2 + rank, 2), [weight])  # other options; nothing is due
    averager.step = 1 + rank
    average(averager, [weight])  # other steps; only rank 1 is due
    assert averager.step == 1 + rank
    averager.step = 1
    average(averager, [weight])
    averager.step += 2 * rank
    average(averager, [weight])  # other steps, later
    assert averager.step == 2 + 2 * rank
    averager.step = 4
    average(averager, [weight] if rank else [weight, torch.nn.Parameter(torch.ones(3))])  # other parameters
    average(averager, [weight] if rank else [weight.view(2, 2)])  # other shapes
    average(averager, [weight] if rank else [3])  # an error of one rank
    average(averager, iter([]))  # a generator that was used before
    averager.average_parameters([weight])
    assert averager.step == 5
    assert torch.equal(weight, torch.full((4,), 0.5))
    return errors


def test_errors_are_those_of_all_ranks_and_leave_the_weights():
    first, second = run_ranks(apart, 2, deadline=90)
    options, steps, later_steps, parameters, shapes, own_error, nothing = first
    assert "differ in averager: rank 0 has PeriodicModelAverager(period=2, warmup_steps=2)" in options
    assert "RanksDisagree: " in steps
    assert "differ in step: rank 0 has 1, rank 1 has 2" in steps
    assert "RanksDisagree: averaging 0: the ranks do not average together" in later_steps
    assert "rank 0 at step 2, rank 1 at step 4" in later_steps
    assert "rank 1 averages other parameters than the others" in parameters
    assert "rank 0 has 7 elements, rank 1 has 4 elements" in parameters
    assert "rank 1 averages other parameters" in shapes
    assert own_error.startswith("WrongType: params holds a int; pass model.parameters()")
    assert "rank 0 raised WrongType: params holds a int" in second[5]
    assert nothing.startswith("InvalidValue: there is no parameter that requires a gradient")
    assert first[:5] == second[:5]


def a_rank_that_stays_away(rank):
    group = dist.new_group(timeout=timedelta(seconds=3))
    weight = torch.nn.Parameter(torch.tensor(float(rank)))
    averager = compat.PeriodicModelAverager(1, 0, group)
    averager.average_parameters([weight])
    if rank == 0:
        with pytest.raises(gl.PeerLost, match="rank 1 is gone or did not answer within 3 s"):
            averager.average_parameters([weight])
    return weight.item(), averager.step


def test_a_rank_that_stays_away_is_named():
    assert run_ranks(a_rank_that_stays_away, 2) == [(0.5, 1), (0.5, 1)]


PERIODIC = [
    ((0,), "period=0; use a whole number of steps from 1 up"),
    ((2.5,), "period=2.5; use a whole number"),
    ((2, -1), "warmup_steps=-1; use a whole number of steps from 0 up"),
    ((2,), "process_group is None, the default process group, and there is none; call"),
    ((2, 0, "world"), "process_group is a process group or None, got str"),
]
HIERARCHICAL = [
    ((), r"period_group_size_dict is empty; use \{period: group size\}"),
    (({},), "period_group_size_dict is empty"),
    (([4],), "period_group_size_dict is a list; use"),
    (({0: 2},), "a period of period_group_size_dict=0; use"),
    (({2: 0},), "period 2 has a group size of 0; use a whole number"),
    (({4: 2, 2: 4},), r"period 2 .* comes after period 4 .* must increase"),
    (({2: 4, 4: 2},), r"groups of 2 comes after .* must increase"),
]


@pytest.mark.parametrize(("arguments", "message"), PERIODIC)
def test_options_of_periods_that_are_out_of_range_are_refused(arguments, message):
    with pytest.raises(gl.GradlaneError, match=message):
        compat.PeriodicModelAverager(*arguments)


@pytest.mark.parametrize(("arguments", "message"), HIERARCHICAL)
def test_hierarchies_that_are_none_are_refused(arguments, message):
    with pytest.raises(gl.GradlaneError, match=message):
        compat.HierarchicalModelAverager(*arguments)


def sizes_that_do_not_fit(rank):
    with pytest.raises(gl.InvalidValue, match="period 2 has groups of 2, which does not divide the 3 ranks"):
        compat.HierarchicalModelAverager({2: 2, 4: 3})
    with pytest.raises(
        gl.InvalidValue, match=r"the last group size .* is 1, and the process group has 3 ranks"
    ):
        compat.HierarchicalModelAverager({2: 1})
    return True


def test_group_sizes_must_fit_the_ranks():
    assert run_ranks(sizes_that_do_not_fit, 3) == [True] * 3


# Lanes


def lanes(rank):
    weight = torch.nn.Parameter(torch.tensor(float(rank)))
    counts = [len(open_lanes())]
    averager = periodic(warmup_steps=1)
    averager.average_parameters([weight])
    averager.average_parameters([weight])
    counts.append(len(open_lanes()))
    again = copy.deepcopy(averager)
    assert again.step == 2
    del averager
    gc.collect()
    join_ending_threads()  # a dropped lane ends by itself
    group = dist.new_group()
    other = periodic(warmup_steps=0, process_group=group)
    other.average_parameters([weight])
    counts.append(len(open_lanes()))
    dist.destroy_process_group(group)
    again.step = 1
    again.average_parameters([weight])  # closes the lane of the destroyed group, and opens one
    counts.append(len(open_lanes()))
    gl.shutdown()
    counts.append(len(open_lanes()))
    return counts


def test_lanes_end_with_their_averager_and_their_group():
    for counts in run_ranks(lanes, 2):
        assert counts == [0, 1, 1, 1, 0]
