"""What breaks torch's PowerSGD hooks on Gloo does not break these; torch's end is told in comments."""

import gc
import math
import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks

from ..support.powersgd_hooks import HOOKS, SMALL, finite, gradient, hooked, soon, stepping
from ..support.training import ComplexWeights, SparseLookup, build, data, flat, replicas_equal

TROUBLES = {
    "nan": lambda loss, rank: loss * (math.nan if rank == 0 else 1.0),
    "inf": lambda loss, rank: loss * (math.inf if rank == 1 else 1.0),
    "zero": lambda loss, rank: loss * 0.0,
    "denormal": lambda loss, rank: loss * 1e-42,
}


def troubled(rank, hook, trouble):
    """The same batch again and again, with trouble in two steps; what arrived in them and afterwards."""
    state = soon(matrix_approximation_rank=2)
    ddp, dense = hooked(state, HOOKS[hook]), DistributedDataParallel(build(), **SMALL)
    dense(data(rank, 0)).backward()
    during, after = [], []
    for step in range(16):
        ddp.zero_grad()
        loss = ddp(data(rank, 0))
        if step in (4, 5):
            loss = TROUBLES[trouble](loss, rank)
        loss.backward()
        (during if step in (4, 5) else after).append(gradient(ddp))
        assert replicas_equal([p.grad.nan_to_num(nan=7.0) for p in ddp.parameters() if p.requires_grad])
    assert finite(state)
    mean = torch.stack(after[-10:]).mean(0)
    distance = float((mean - gradient(dense)).norm() / gradient(dense).norm())
    return [bool(seen.isfinite().all()) for seen in during], distance


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("hook", ["powerSGD", "batched"])
def test_one_bad_step_is_one_bad_step(hook, trouble):
    # torch: NaN, Inf, zero and denormal gradients all leave NaN in P, Q and the error, for ever
    for during, distance in run_ranks(troubled, 2, hook, trouble):
        assert during == [trouble in ("zero", "denormal")] * 2  # the optimizer or GradScaler must see it
        assert distance < 0.5


def unused_now_and_then(rank):
    state = soon()
    ddp = hooked(state, compat.powerSGD_hook, build(sometimes=True), find_unused_parameters=True, **SMALL)
    equal = stepping(ddp, rank, range(8))
    return equal, finite(state), bool(flat(ddp.parameters()).isfinite().all())


def test_unused_parameters():
    # torch: a gradient of zeros becomes NaN
    assert run_ranks(unused_now_and_then, 2) == [(True, True, True)] * 2


def awkward_parameters(rank):
    """0-d, 3-d and frozen parameters are in every model here; complex and sparse ones are not."""
    outcomes = {}
    for kind in (ComplexWeights, SparseLookup):
        ddp = hooked(soon(), compat.powerSGD_hook, build(kind))
        outcomes[kind.__name__] = stepping(ddp, rank, range(5))
    state = soon()
    ddp = hooked(state, compat.powerSGD_hook)
    stepping(ddp, rank, range(3))
    shapes = {tuple(residual.shape) for residual in state.error_dict.values()}
    return outcomes, shapes >= {(), (2, 3, 24), (24, 24)}


def test_parameters_of_every_kind():
    # torch: IndexError for a 0-d parameter; ranks diverge with complex ones
    for outcomes, all_shapes in run_ranks(awkward_parameters, 2):
        assert outcomes == {"ComplexWeights": True, "SparseLookup": True}
        assert all_shapes


def train_a_little(rank):
    ddp = hooked(soon(), compat.powerSGD_hook)
    return stepping(ddp, rank, range(4))


def destroyed_at_once(rank, path, cycles):
    store = dist.FileStore(path, 2)
    equal = []
    for cycle in range(cycles):
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(cycle), store),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=30),
        )
        equal.append(train_a_little(rank))
        gc.collect()  # DDP itself must be gone, with or without a hook
        dist.destroy_process_group()
    return equal


@pytest.mark.parametrize("cycles", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_destroying_the_group_right_after(cycles):
    # torch: aborts or hangs
    assert run_ranks(destroyed_at_once, 2, cycles, init=False, deadline=280) == [[True] * cycles] * 2


def no_more_lanes_than(count):
    """Whether no more lanes are open. The thread of a lane whose state was collected ends a moment later."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if sum(thread.name.startswith("gradlane-") for thread in threading.enumerate()) <= count:
            return True
        time.sleep(0.01)
    return False


def one_after_the_other(rank):
    for _ in range(6):
        train_a_little(rank)
        gc.collect()
    return no_more_lanes_than(1)


def test_a_state_that_is_dropped_takes_its_lane_along():
    # when the next one opens: so there is one at the end
    assert run_ranks(one_after_the_other, 2) == [True, True]


def one_group_after_the_other(rank):
    """The hook stays, and the groups that it was used with are destroyed."""
    for _ in range(4):
        group = dist.new_group([0, 1])
        ddp = DistributedDataParallel(build(), process_group=group)
        ddp.register_comm_hook(group, compat.allreduce_hook)
        ddp(data(rank, 0)).backward()
        del ddp
        gc.collect()
        dist.destroy_process_group(group)
        del group
        gc.collect()
    return no_more_lanes_than(1)


def test_a_group_that_is_destroyed_takes_its_lane_along():
    assert run_ranks(one_group_after_the_other, 2) == [True, True]


def on_a_subgroup(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = compat.PowerSGDState(pairs[rank // 2], start_powerSGD_iter=2, min_compression_rate=1)
    ddp = DistributedDataParallel(build(), process_group=pairs[rank // 2], **SMALL)
    ddp.register_comm_hook(state, compat.powerSGD_hook)
    for step in range(4):
        ddp.zero_grad()
        ddp(data(rank, step)).backward()
    return gradient(ddp)


def test_the_group_of_the_state_is_used():
    first, second, third, fourth = run_ranks(on_a_subgroup, 4)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not torch.equal(first, third)


def misuse(rank):
    state = soon()
    ddp = hooked(state, compat.powerSGD_hook)
    stepping(ddp, rank, range(3))
    with pytest.raises(
        gl.WrongState, match="matrix_approximation_rank cannot change once training has begun"
    ):
        state.matrix_approximation_rank = 4
    with pytest.raises(gl.WrongState, match="name_parameters after the first backward"):
        state.name_parameters(ddp)
    with pytest.raises(gl.InvalidValue, match="iter=-1"):
        state.iter = -1
    state.iter = 10
    assert stepping(ddp, rank, range(1))
    assert state.iter == 11

    other = hooked(state, compat.batched_powerSGD_hook)
    with pytest.raises(gl.WrongState, match="in use with another hook; make one for each DDP model"):
        other(data(rank, 0)).backward()
    torchs = hooked(theirs.PowerSGDState(None), compat.powerSGD_hook)
    with pytest.raises(gl.WrongType, match=r"a gradlane.compat.PowerSGDState, got torch\..*import both"):
        torchs(data(rank, 0)).backward()
    strange = soon()
    strange.name_parameters(build())
    other = hooked(strange, compat.powerSGD_hook)
    with pytest.raises(gl.InvalidValue, match="none of the model given to name_parameters"):
        other(data(rank, 0)).backward()
    return True


def test_wrong_use_is_told_what_to_do():
    assert run_ranks(misuse, 2) == [True, True]


def different_ranks(rank, case):
    state = soon(matrix_approximation_rank=1 + rank if case == "rank" else 1)
    ddp = hooked(state, compat.powerSGD_hook)
    if case == "names" and rank == 1:
        state.name_parameters(ddp)
    with pytest.raises(gl.RanksDisagree) as caught:
        ddp(data(rank, 0)).backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "says"), [("rank", "differ in hook: .*rank=2"), ("names", "differ in parameters")]
)
def test_ranks_that_differ_are_refused(case, says):
    # torch: other sizes on the wire, which abort the process
    first, second = run_ranks(different_ranks, 2, case)
    assert first == second
    assert re.search(says, first)
