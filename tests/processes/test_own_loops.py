"""Loops without DDP: what reduce_gradients makes of p.grad."""

import copy
import gc
import math
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradlane as gl
from gradlane.local import run_ranks

from ..support.training import ComplexWeights, SparseLookup, build, data, flat, replicas_equal

SMALL = 0.004  # MB: several buckets
STRATEGIES = (
    "Mean()",
    "Cast(Mean(), bfloat16)",
    "ErrorFeedback(Sharded(Int8(block=32)))",
    "ErrorFeedback(Gathered(TopK(0.1)))",
    "ErrorFeedback(PowerSGD(1, min_compression_rate=1))",
    "Combined(Median())",
)


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]


def chain():
    """One parameter for each layer, so that DDP sees gradients in just the reverse order of parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(24, 24, bias=False), nn.Tanh()) for _ in range(6)])


def backward(model, rank, step):
    model(data(rank, step)).square().mean().backward()


def as_ddp(rank, strategy):
    """Two steps with DDP; then DDP goes on, and so does a loop without it, from the same state."""
    ddp = DistributedDataParallel(chain(), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = gl.attach(ddp, strategy, timeout=30)
    for step in range(2):
        optimizer.zero_grad()
        backward(ddp, rank, step)
        optimizer.step()
    own = copy.deepcopy(ddp.module)
    own_optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
    own_loop = gl.attach_without_ddp(own, strategy, bucket_mb=SMALL, timeout=30)
    own_loop.load_state_dict(attachment.state_dict())
    equal = []
    for step in range(2, 6):
        optimizer.zero_grad()
        own_optimizer.zero_grad()
        backward(ddp, rank, step)
        backward(own, rank, step)
        own_loop.reduce()
        equal.append(torch.equal(flat(grads(ddp.module)), flat(grads(own))))
        optimizer.step()
        own_optimizer.step()
    buckets = attachment._step.layout()
    assert own_loop._step.layout() == buckets
    return equal, len(buckets) > 1, replicas_equal(own.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_bit_for_bit_to_ddp_with_the_same_buckets(strategy):
    assert run_ranks(as_ddp, 3, strategy) == [([True] * 4, True, True)] * 3


def by_hand(model):
    """What people write: flatten, all-reduce, divide, copy back."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def hand_written(rank, dtype, accumulate):
    """Against the loop that people write, on the model with awkward parameters."""
    theirs, ours = build(dtype=dtype), build(dtype=dtype)
    for step in range(3):
        theirs.zero_grad()
        ours.zero_grad()
        for part in range(accumulate):
            for model in (theirs, ours):
                model(data(rank, 10 * step + part, dtype)).backward()
        by_hand(theirs)
        gl.reduce_gradients(ours, "Mean()", bucket_mb=SMALL, timeout=30)
        mean, reference = flat(grads(ours)), flat(grads(theirs))
        assert (mean - reference).abs().max() < 4 * torch.finfo(dtype).eps * reference.abs().max()
        assert replicas_equal(grads(ours))
    own_loop = gl.reduce_gradients(ours, "Mean()", bucket_mb=SMALL, timeout=30)
    metrics = own_loop.metrics()
    assert metrics["comm/steps"] == 4
    assert metrics["comm/step/exposed_seconds"] > 0
    assert ours.frozen.grad is None
    return metrics["comm/step/collectives"]


@pytest.mark.parametrize(
    ("dtype", "accumulate"), [(torch.float32, 1), (torch.float64, 1), (torch.bfloat16, 1), (torch.float32, 3)]
)
def test_the_mean_is_that_of_a_hand_written_loop(dtype, accumulate):
    collectives = run_ranks(hand_written, 3, dtype, accumulate)
    assert collectives[0] >= 3  # several buckets, and who has which gradient


def missing(rank):
    """a on all ranks, b on rank 0 only, c on rank 1 only, d on none; the same with DDP."""

    def model():
        return nn.ParameterDict({name: nn.Parameter(torch.ones(3, 2)) for name in "abcd"})

    used = {0: "ab", 1: "ac", 2: "a"}[rank]
    ours = model()
    for _ in range(3):
        ours.zero_grad()
        sum((rank + 1.0) * ours[name].sum() for name in used).backward()
        gl.reduce_gradients(ours, "Mean()", timeout=30)
    reference = model()

    class Forward(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = reference

        def forward(self, names):
            return sum((rank + 1.0) * self.inner[name].sum() for name in names)

    ddp = DistributedDataParallel(Forward(), find_unused_parameters=True)
    ddp(used).backward()
    told = {name: None if p.grad is None else p.grad[0, 0].item() for name, p in ours.items()}
    theirs = {name: None if p.grad is None else p.grad[0, 0].item() for name, p in reference.items()}
    assert told == pytest.approx(theirs)
    return told


def test_a_missing_gradient_counts_as_zeros_and_stays_none_where_all_lack_it():
    told = run_ranks(missing, 3)
    assert told[0] == told[1] == told[2]
    assert told[0] == pytest.approx({"a": 2.0, "b": 1 / 3, "c": 2 / 3, "d": None})


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(24, 4, dtype=torch.float64)
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.plain = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.plain(self.narrow(self.wide(x.double()).bfloat16()).float()).square().mean()


def kinds(rank, kind):
    made = {"mixed": Mixed, "sparse": SparseLookup, "complex": ComplexWeights}[kind]
    ours, theirs = build(made), build(made)
    for step in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            model(data(rank, step)).backward()
        if kind == "sparse" and rank == 1 and step == 1:
            ours.table.weight.grad = theirs.table.weight.grad = None
        own_loop = gl.reduce_gradients(ours, "Mean()", timeout=30)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if q.numel():
                mine = (torch.zeros_like(q) if q.grad is None else q.grad.to_dense()) / 3
                dist.all_reduce(mine)
                assert p.grad.dtype == q.dtype
                torch.testing.assert_close(p.grad.to_dense(), mine)
    if kind == "sparse":
        assert ours.table.weight.grad.is_sparse
    return own_loop._step.layout()


@pytest.mark.parametrize(
    ("kind", "buckets"),
    [
        ("mixed", [[f"{part}.bias", f"{part}.weight"] for part in ("plain", "narrow", "wide")]),
        ("sparse", [["head.bias", "head.weight"], ["table.weight"]]),
        ("complex", [["real.bias", "real.weight"], ["weight"]]),
    ],
)
def test_each_kind_of_gradient_has_buckets_of_its_own(kind, buckets):
    assert run_ranks(kinds, 3, kind) == [buckets] * 3


def odd_places(rank):
    """Gradients that are transposed, strided, expanded, views, and sparse where no module says so."""
    names = ("transposed", "strided", "expanded", "sparse", "view")
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(4, 6)) for name in names})
    own = torch.arange(24.0).view(4, 6) + 100 * rank
    whole = torch.zeros(100)
    model["transposed"].grad = own.t().contiguous().t()
    model["strided"].grad = torch.zeros(4, 12)[:, ::2].copy_(own)
    model["expanded"].grad = torch.full((1, 1), float(rank)).expand(4, 6)
    model["sparse"].grad = own.to_sparse()
    model["view"].grad = whole[10:34].view(4, 6).copy_(own)
    strides = {name: model[name].grad.stride() for name in ("transposed", "strided", "view")}
    gl.reduce_gradients(model, "Mean()", timeout=30)
    mean = torch.arange(24.0).view(4, 6) + 50
    for name in ("transposed", "strided", "sparse", "view"):
        assert torch.equal(model[name].grad, mean), name
    assert torch.equal(model["expanded"].grad, torch.full((4, 6), 0.5))
    assert strides == {name: model[name].grad.stride() for name in strides}
    return torch.equal(whole[10:34].view(4, 6), mean)


def test_gradients_in_odd_places():
    assert run_ranks(odd_places, 2) == [True, True]


def resumed(rank, folder, how):
    strategy = "ErrorFeedback(Sharded(Int4(block=32)))"

    def run(model, own_loop, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in steps:
            optimizer.zero_grad()
            model(data(rank, step)).backward()
            own_loop.reduce()
            optimizer.step()

    straight = build()
    with gl.attach_without_ddp(straight, strategy, bucket_mb=SMALL, timeout=30) as own_loop:
        run(straight, own_loop, range(6))
    first = build()
    with gl.attach_without_ddp(first, strategy, bucket_mb=SMALL, timeout=30) as own_loop:
        run(first, own_loop, range(3))
        state = own_loop.state_dict()
        own_loop.save(folder)
    second = copy.deepcopy(first)
    # In its first step a resumed run has the buckets that were saved, whatever its own are.
    bucket_mb = SMALL if how == "state" else 25.0
    with gl.attach_without_ddp(second, strategy, bucket_mb=bucket_mb, timeout=30) as own_loop:
        own_loop.load_state_dict(state) if how == "state" else own_loop.load(folder)
        assert own_loop.step == 3
        run(second, own_loop, range(3, 6) if how == "state" else range(3, 4))
    if how == "folder":
        with gl.attach_without_ddp(first, strategy, bucket_mb=SMALL, timeout=30) as own_loop:
            own_loop.load(folder)
            run(first, own_loop, range(3, 4))
        straight = first
    return all(map(torch.equal, straight.parameters(), second.parameters()))


@pytest.mark.parametrize("how", ["state", "folder"])
def test_a_resumed_loop_goes_on_bit_for_bit(how, tmp_path):
    assert run_ranks(resumed, 2, tmp_path / "checkpoint", how) == [True, True]


def not_finite(rank, policy):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    own_loop = gl.attach_without_ddp(model, "ErrorFeedback(Sharded(Int8()))", nonfinite=policy, timeout=30)
    story = []
    for step in range(4):
        optimizer.zero_grad()
        batch = data(rank, step)
        if (step, rank) == (2, 1):
            batch[0, 0] = math.nan
        before = [p.detach().clone() for p in model.parameters()]
        memory = own_loop.state_dict()["state"]
        model(batch).backward()
        try:
            own_loop.reduce()
        except gl.NonFinite as error:
            story.append(str(error).split(":")[0])
        optimizer.step()
        if own_loop.skipped:
            after = own_loop.state_dict()["state"]
            assert all(map(torch.equal, model.parameters(), before))
            assert torch.equal(flat(memory["memory"].values()), flat(after["memory"].values()))
            story.append(step)
    assert replicas_equal([p.detach() for p in model.parameters()])
    return story, own_loop.metrics()["comm/skipped"]


@pytest.mark.parametrize(("policy", "story"), [("skip", [2]), ("raise", ["step 2", 2])])
def test_a_step_that_is_not_finite_leaves_no_trace(policy, story):
    assert run_ranks(not_finite, 2, policy) == [(story, 1)] * 2


class Scale:
    scale = 1024.0

    def get_scale(self):
        return self.scale


def scaled(rank):
    strategy, scaler = "ErrorFeedback(Sharded(Int4(block=32)))", Scale()
    plain, ours = chain(), chain()
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad()
        scaler.scale = 2.0 ** (10 - step)
        backward(plain, rank, step)
        (ours(data(rank, step)).square().mean() * scaler.scale).backward()
        gl.reduce_gradients(plain, strategy, timeout=30)
        own_loop = gl.reduce_gradients(ours, strategy, timeout=30, scaler=scaler)
        torch.testing.assert_close(flat(grads(ours)) / scaler.scale, flat(grads(plain)))
    return own_loop.scaler is scaler


def test_memory_is_in_units_of_the_loss():
    assert run_ranks(scaled, 2) == [True, True]


def drifted(rank):
    model = build()
    own_loop = gl.attach_without_ddp(model, "Mean()", verify_every=2, timeout=30)
    for step in range(2):
        if rank == 1:
            with torch.no_grad():
                model.scale += 1
        model(data(rank, step)).backward()
        if step == 1:
            with pytest.raises(gl.RanksDisagree, match="rank 1 of 2 has drifted from the others in scale"):
                own_loop.reduce()
        else:
            own_loop.reduce()
    return True


def test_weights_that_drift_are_named():
    assert run_ranks(drifted, 2) == [True, True]


def overlapped(rank):
    """The answer to bucket 0 waits until bucket 1 was encoded, which would never be if they went in turn."""
    second_encoded = threading.Event()
    seen = []

    @gl.strategy_from
    async def watched(bucket):
        if bucket.index == 1:
            second_encoded.set()
        mean = await gl.all_reduce(bucket.flat)
        if bucket.index == 0:
            seen.append(second_encoded.wait(20))
        return gl.Reduced(mean)

    model = chain()
    backward(model, rank, 0)
    gl.reduce_gradients(model, watched, bucket_mb=SMALL, timeout=40)
    return seen


def test_buckets_are_encoded_while_others_travel():
    assert run_ranks(overlapped, 2) == [[True], [True]]


def comes_and_goes(rank):
    """The own_loop lives as long as its model, and keeps no model alive."""
    model = build()
    model(data(rank, 0)).backward()
    first = gl.reduce_gradients(model, "ErrorFeedback(Sharded(Int8()))", timeout=30)
    assert gl.reduce_gradients(model, gl.ErrorFeedback(gl.Sharded(gl.Int8())), timeout=30) is first
    assert first.step == 2
    first.swap("Mean()")
    assert gl.reduce_gradients(model, "Mean()", timeout=30) is first
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(gl.WrongState, match="the model of this attachment was deleted"):
        first.reduce()
    other = build()
    compiled = torch.compile(other, backend="eager")
    compiled(data(rank, 0)).backward()
    second = gl.reduce_gradients(compiled, "Mean()", timeout=30)
    assert gl.reduce_gradients(other, "Mean()", timeout=30) is second
    assert "closed" in repr(first)
    second.close()
    second.close()
    third = gl.reduce_gradients(other, "Mean()", timeout=30)
    assert third is not second
    gl.shutdown()
    assert "closed" in repr(third)
    return True


def test_one_reducer_for_each_model_until_it_is_closed():
    assert run_ranks(comes_and_goes, 2) == [True, True]


def in_a_group(rank):
    group = dist.new_group([0, 2])
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.full((1, 2), float(rank))
    if rank == 1:
        with pytest.raises(gl.WrongType, match="not a process group that this rank is in"):
            gl.reduce_gradients(model, "Mean()", group=group)
    else:
        gl.reduce_gradients(model, "Mean()", group=group, timeout=30)
    return model.weight.grad[0, 0].item()


def test_the_group_may_be_a_part_of_all_ranks():
    assert run_ranks(in_a_group, 3) == [1.0, 1.0, 1.0]


def test_on_a_stream_with_torchs_fake_group():
    """Its collectives do nothing, so that the mean is a share of this rank's own."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        model = nn.ParameterDict({"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(2))})
        model["a"].grad = torch.full((4,), 8.0)
        gl.reduce_gradients(model, "Mean()")
        assert model["a"].grad.tolist() == [2.0] * 4
        assert model["b"].grad is None
    finally:
        gl.shutdown()
