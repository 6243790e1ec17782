"""Loops without DDP: wrong use, ranks that are missing or raise, models that change."""

import math
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.training import build, data, flat, replicas_equal


def ready(rank=0, step=0):
    model = build()
    model(data(rank, step)).backward()
    return model


def test_without_a_process_group():
    with pytest.raises(gl.WrongState, match="there is no process group; call"):
        gl.reduce_gradients(nn.Linear(2, 2), "Mean()")


def wrong_use(rank):
    for given, error, message in [
        (DistributedDataParallel(build()), gl.WrongType, "this is a DDP model.*use gradlane.attach"),
        (nn.Sequential(DistributedDataParallel(build())), gl.WrongType, "this is a DDP model"),
        (list(build().parameters()), gl.WrongType, "needs a module, got list; pass the model"),
        (nn.Linear(2, 2).requires_grad_(False), gl.InvalidValue, "no parameter that needs a gradient"),
        (nn.LazyLinear(2), gl.WrongState, "weight has no shape yet .*; run the model once"),
    ]:
        with pytest.raises(error, match=message):
            gl.reduce_gradients(given, "Mean()")
    model = ready(rank)
    for options, error, message in [
        ({"bucket_mb": 0}, gl.InvalidValue, "bucket_mb=0 is not possible"),
        ({"bucket_mb": math.inf}, gl.InvalidValue, "bucket_mb=inf is not possible; use a finite number"),
        ({"buckets": 3}, gl.WrongType, "there is no option 'buckets'; use observer"),
        ({"timeout": 0}, gl.InvalidValue, "timeout=0 leaves no time"),
        ({"nonfinite": "ignore"}, gl.InvalidValue, "nonfinite='ignore' is not known"),
        ({"group": 3}, gl.WrongType, "group is a int, not a process group"),
    ]:
        with pytest.raises(error, match=message):
            gl.reduce_gradients(model, "Mean()", **options)
    with pytest.raises(gl.WrongType, match="got the class Mean"):
        gl.reduce_gradients(model, gl.Mean)
    with pytest.raises(gl.WrongState, match="nothing is attached to this model; pass a strategy"):
        gl.reduce_gradients(model)
    own_loop = gl.reduce_gradients(model, "Mean()", timeout=30)
    for options, message in [
        (
            {"strategy": "Noop()"},
            r"Mean\(\) reduces the gradients.*call requests Noop\(\).*swap.*close",
        ),
        ({"bucket_mb": 1.0}, "other options than the first one, which had bucket_mb=25"),
        ({"timeout": 31}, "other options than the first one.*timeout=30"),
    ]:
        with pytest.raises(gl.WrongState, match=message):
            gl.reduce_gradients(model, **{"strategy": "Mean()", "timeout": 30, **options})
    with pytest.raises(gl.WrongState, match="this model has an attachment already"):
        gl.attach_without_ddp(model, "Mean()")
    with pytest.raises(gl.InvalidValue, match=r"saved by Noop\(\), this attachment runs Mean"):
        own_loop.load_state_dict({**own_loop.state_dict(), "strategy": "Noop()"})
    assert own_loop.step == 1
    assert gl.reduce_gradients(model) is own_loop
    assert own_loop.step == 2
    own_loop.close()
    with pytest.raises(gl.WrongState, match="this attachment is closed; call reduce_gradients"):
        own_loop.reduce()
    return True


def test_wrong_use_is_told_what_to_do():
    assert run_ranks(wrong_use, 2) == [True, True]


def differing(rank, case):
    odd = rank == 1
    module, options = nn.Sequential(nn.Embedding(4, 4, sparse=case == "sparse" and odd), nn.Linear(4, 4)), {}
    strategy = "Noop()" if case == "strategy" and odd else "Mean()"
    if case == "buckets":
        options = {"bucket_mb": 2.0 if odd else 1.0}
    if case == "parameters" and odd:
        module[1].bias.requires_grad_(False)
    try:
        gl.reduce_gradients(module, strategy, timeout=10, **options)
    except gl.RanksDisagree as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("strategy", "strategy: rank 0 has Mean(), rank 1 has Noop()"),
        ("buckets", "bucket_mb: rank 0 has 1.0, rank 1 has 2.0"),
        ("parameters", "1.bias [4] float32 trained, rank 1 has 1.bias [4] float32 frozen"),
        ("sparse", "sparse: rank 0 has 0 entries, rank 1 has 1 entries"),
    ],
)
def test_ranks_that_differ_are_refused_everywhere(case, says):
    answers = run_ranks(differing, 2, case)
    assert answers[0] == answers[1]
    assert says in answers[0]


def alone(rank, calls_before):
    """Rank 0 calls once more than rank 1; how long it waited, and who is named."""
    model = ready(rank)
    for _ in range(calls_before):
        gl.reduce_gradients(model, "Mean()", timeout=2)
    dist.barrier()
    board = dist.distributed_c10d._get_default_store()
    if rank == 1:
        board.wait(["given up"], timedelta(seconds=40))  # alive, but elsewhere
        return None
    own = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    began = time.monotonic()
    with pytest.raises(gl.PeerLost) as caught:
        gl.reduce_gradients(model, "Mean()", timeout=2)
    waited = time.monotonic() - began
    board.set("given up", "yes")
    assert torch.equal(flat(own), flat([p.grad for p in model.parameters() if p.requires_grad]))
    return caught.value.rank, waited < 7


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_call_on_one_rank_only_names_the_missing_one(calls_before):
    assert run_ranks(alone, 2, calls_before) == [(1, True), None]


def raising(rank):
    """Rank 1 raises in step 1, bucket 1: all ranks raise in the same step, p.grad is as it was, all go on."""

    @gl.strategy_from
    async def fragile(bucket):
        if (bucket.rank, bucket.step, bucket.index) == (1, 1, 1):
            raise ArithmeticError("on purpose")
        return gl.Reduced(await gl.all_reduce(bucket.flat))

    model = build()
    own_loop = gl.attach_without_ddp(model, fragile, bucket_mb=0.004, timeout=30)
    story = []
    for step in range(3):
        model.zero_grad()
        model(data(rank, step)).backward()
        own = flat([p.grad for p in model.parameters() if p.requires_grad])
        try:
            own_loop.reduce()
        except (ArithmeticError, gl.PeerFailed) as error:
            story.append((step, type(error).__name__, getattr(error, "rank", None)))
            assert torch.equal(own, flat([p.grad for p in model.parameters() if p.requires_grad]))
    assert replicas_equal([p.grad for p in model.parameters() if p.requires_grad])
    return story


def test_an_error_on_one_rank_is_one_on_all_and_leaves_the_gradients_alone():
    peer = [(1, "PeerFailed", 1)]
    assert run_ranks(raising, 3) == [peer, [(1, "ArithmeticError", None)], peer]


def changing(rank, change):
    """A model that is not what the ranks agreed on, on rank 1 only: nobody waits for nothing."""
    model = ready(rank)
    own_loop = gl.reduce_gradients(model, "ErrorFeedback(Sharded(Int8()))", timeout=30)
    if rank == 1:
        if change == "thawed":
            model.frozen.requires_grad_(True)
        elif change == "replaced":
            model.scale = nn.Parameter(torch.tensor(2.0))
        elif change == "added":
            model.extra = nn.Parameter(torch.ones(2))
        else:
            del model.cube
    try:
        own_loop.reduce()
    except (gl.WrongState, gl.PeerFailed) as error:
        story = f"{type(error).__name__}: {error}"
    if rank == 1:
        if change == "thawed":
            model.frozen.requires_grad_(False)
        if change == "added":
            del model.extra
    if change in ("thawed", "added"):  # put right, the same attachment goes on
        own_loop.reduce()
        assert replicas_equal([p.grad for p in model.parameters() if p.requires_grad])
        assert own_loop.step == 3
    return story


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("thawed", "frozen needs a gradient, and was frozen when the strategy was attached; close"),
        ("replaced", "scale is not the parameter that it was when the strategy was attached; close"),
        ("added", "extra is not the parameter that it was"),
        ("removed", "cube is not the parameter that it was"),
    ],
)
def test_a_model_that_changes_is_refused_on_all_ranks(change, says):
    first, second = run_ranks(changing, 2, change)
    assert second.startswith(f"WrongState: {says}")
    assert first.startswith("PeerFailed")
    assert f"rank 1 raised WrongState: {says}" in first


def frozen_on_the_way(rank):
    """Freezing is fine: a parameter that nobody has a gradient for keeps none."""
    model = ready(rank)
    gl.reduce_gradients(model, "Mean()", timeout=30)
    model.zero_grad()
    model.layers[0].requires_grad_(False)
    model(data(rank, 1)).backward()
    gl.reduce_gradients(model, "Mean()", timeout=30)
    assert model.layers[0].weight.grad is None
    return replicas_equal([p.grad for p in model.layers[1:].parameters()])


def test_parameters_may_be_frozen_on_the_way():
    assert run_ranks(frozen_on_the_way, 2) == [True, True]


def out_of_memory(rank):
    """Rank 1 cannot copy the gradients of its second bucket."""
    model = ready(rank)
    own_loop = gl.attach_without_ddp(model, "Mean()", bucket_mb=0.004, timeout=30)
    own_loop.reduce()
    second = own_loop._buckets[1]
    if rank == 1:
        second.filled = raise_memory_error
    try:
        own_loop.reduce()
    except (MemoryError, gl.PeerFailed) as error:
        story = f"{type(error).__name__}: {error}"
    if rank == 1:
        del second.filled
    own_loop.reduce()
    return "rank 1 raised MemoryError: no room" in story or story == "MemoryError: no room", own_loop.step


def raise_memory_error(parameters):
    raise MemoryError("no room")


def test_what_goes_wrong_on_the_way_to_the_lane_is_told_to_all():
    assert run_ranks(out_of_memory, 2) == [(True, 3)] * 2
