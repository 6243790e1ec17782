"""Post-local SGD under torch's names: the hook, its state and the optimizer."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks

from ..support.grids import grid
from ..support.machines import move_to, why_not
from ..support.post_local import SMALL, Run, Theirs, all_equal, gathered, periodic
from ..support.training import build, data, flat

NAMES = ("PostLocalSGDState", "post_localSGD_hook", "PeriodicModelAverager", "HierarchicalModelAverager",
         "PostLocalSGDOptimizer")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs(name):
    def parameters(library):
        found = getattr(library, name)
        signature = inspect.signature(found.__init__ if inspect.isclass(found) else found)
        return [(p.name, p.default, p.kind) for p in signature.parameters.values()]

    assert parameters(compat) == parameters(Theirs)


# Parity: the same weights in every step, where torch works


def averager_of(library, kind, world):
    if kind == "periodic":
        return library.PeriodicModelAverager(period=2, warmup_steps=4)
    # torch counts periods from step 0. With a warm-up that all periods divide, both begin at the same step.
    inner = 2 if world == 4 else 1
    return library.HierarchicalModelAverager({2: inner, 4: world}, warmup_steps=4)


def both(rank, kind, inside):
    world = dist.get_world_size()
    subgroup, _ = dist.new_subgroups(2 if world == 4 else 1 if inside == "alone" else world)
    weights = []
    for library in (Theirs, compat):
        averager = averager_of(library, kind, world)
        run = Run(library, averager, start=4, subgroup=subgroup, allreduce=inside != "nothing")
        weights.append(run.steps(rank, range(10)))
        assert run.optimizer.averager.step == 10
    equal = [torch.equal(a, b) for a, b in zip(*weights, strict=True)]
    return equal, [all_equal(own) for own in weights[1]]


PARITY = grid(
    (2, 3, 4), ("periodic", "hierarchical"), ("subgroup", "alone", "nothing"),
    quick=[(2, "periodic", "alone"), (3, "hierarchical", "nothing"), (4, "hierarchical", "subgroup")],
)  # fmt: skip


@pytest.mark.parametrize(("world", "kind", "inside"), PARITY)
def test_weights_are_torchs_to_the_bit(world, kind, inside):
    """The means divide, add and round in torch's order, and the weights lie side by side in torch's order."""
    together = inside == "subgroup" and world < 4  # a subgroup of all ranks
    for equal, agreed in run_ranks(both, world, kind, inside, deadline=90):
        assert equal == [True] * 10
        assert agreed[:5] == [True] * 5  # four dense steps, then the first averaging
        assert agreed[8]  # all periods are due
        assert agreed[5] == agreed[7] == together
        assert agreed[6] == (together or kind == "periodic")


# The hook


def over_which_ranks(rank):
    """Of each backward: whether the gradient is the mean of all ranks, of the pair, or this rank's own."""
    pair, _ = dist.new_subgroups(2)
    run = Run(compat, periodic(), start=2, subgroup=pair)
    alone = Run(compat, periodic(), start=2, subgroup=pair, allreduce=False)
    found = []
    for step in range(4):
        own = DistributedDataParallel(build(), **SMALL)
        with own.no_sync():
            own(data(rank, step)).backward()
        each = gathered(flat([p.grad for p in own.parameters() if p.requires_grad]))
        first = rank // 2 * 2
        means = {"all": sum(each) / 4, "pair": sum(each[first : first + 2]) / 2, "own": each[rank]}
        for which in (run, alone):
            got = which.gradients(rank, step)
            found.append([name for name, mean in means.items() if torch.allclose(got, mean, atol=1e-7)])
    return found[::2], found[1::2], run.state.iter


def test_the_hook_averages_over_all_ranks_then_over_the_subgroup_or_not_at_all():
    for pairs, alone, iteration in run_ranks(over_which_ranks, 4):
        assert pairs == [["all"], ["all"], ["pair"], ["pair"]]
        assert alone == [["all"], ["all"], ["own"], ["own"]]
        assert iteration == 4  # torch stops counting with the warm-up


def default_subgroup(rank, hosts):
    """torch's default needs GPUs: it asks how many there are."""
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(Theirs.PostLocalSGDState(None, None, 0), Theirs.post_localSGD_hook)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        ddp(data(rank, 0)).backward()
    if hosts is not None:
        move_to(hosts[rank])
    run = Run(compat, periodic(warmup_steps=1), start=1)
    run.gradients(rank, 0)
    return [run.gradients(rank, step) for step in (1, 2)]


HOSTS = [
    pytest.param(None, id="one machine"),
    pytest.param(["a", "b", "a"], id="two machines",
                 marks=pytest.mark.skipif(why_not() is not None, reason=str(why_not()))),
]  # fmt: skip


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_default_subgroup_is_the_machine(hosts):
    gradients = run_ranks(default_subgroup, 3, hosts)
    for step in (0, 1):
        first, second, third = (own[step] for own in gradients)
        assert torch.equal(first, third)
        assert torch.equal(first, second) == (hosts is None)


def wrapped(rank):
    pair, _ = dist.new_subgroups(2)
    found = {}
    for name, wrap in (("wide", None), ("fp16", compat.fp16_compress_wrapper),
                       ("bf16", compat.bf16_compress_wrapper)):  # fmt: skip
        run = Run(compat, periodic(), start=1, subgroup=pair, wrap=wrap)
        found[name] = [run.gradients(rank, step) for step in range(2)]
    return found


def test_wrappers_narrow_both_phases():
    for found in run_ranks(wrapped, 4):
        for phase in (0, 1):
            wide = found["wide"][phase]
            for name, bits in (("fp16", 10), ("bf16", 7)):
                error = (found[name][phase] - wide).abs().max()
                assert 0 < error <= wide.abs().max() * 2**-bits


def hooks_of_different_options(rank):
    messages = []
    for mine, match in (
        ({"start_localSGD_iter": 3 + rank}, "differ in start_localSGD_iter: rank 0 has 3, rank 1 has 4"),
        ({"post_local_gradient_allreduce": rank == 0}, "differ in post_local_gradient_allreduce"),
        (
            {"subgroup": dist.group.WORLD if rank else None},
            "differ in subgroup: .* the ranks of each machine",
        ),
    ):
        ddp = DistributedDataParallel(build())
        state = compat.PostLocalSGDState(
            **{"process_group": None, "subgroup": None, "start_localSGD_iter": 3, **mine}
        )
        ddp.register_comm_hook(state, compat.post_localSGD_hook)
        with pytest.raises(gl.RanksDisagree, match=match) as caught:
            ddp(data(rank, 0)).backward()
        messages.append(str(caught.value))
    return messages


def test_ranks_with_different_options_are_refused():
    first, second = run_ranks(hooks_of_different_options, 2)
    assert first == second


def foreign_state(rank):
    for state in (Theirs.PostLocalSGDState(None, None, 3), None):
        ddp = DistributedDataParallel(build())
        ddp.register_comm_hook(state, compat.post_localSGD_hook)
        with pytest.raises(gl.WrongType, match=r"is a gradlane.compat.PostLocalSGDState, got .*import both"):
            ddp(data(rank, 0)).backward()
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(compat.PostLocalSGDState(None, "pair", 0), compat.post_localSGD_hook)
    with pytest.raises(
        gl.WrongType, match="subgroup of PostLocalSGDState is a process group or None, got str"
    ):
        ddp(data(rank, 0)).backward()
    return True


def test_a_foreign_state_is_refused():
    assert run_ranks(foreign_state, 1) == [True]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((-1,), gl.InvalidValue, "start_localSGD_iter=-1; use a whole number of steps from 0 up"),
    ((2.5,), gl.InvalidValue, r"start_localSGD_iter=2.5; use a whole number"),
    ((3, None), gl.WrongType, "post_local_gradient_allreduce is a NoneType; use True or False"),
])  # fmt: skip
def test_options_out_of_range_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        compat.PostLocalSGDState(None, None, *arguments)


# Checkpoints


def resumed(rank, cuts):
    pair, _ = dist.new_subgroups(2)

    def fresh():
        return Run(compat, periodic(period=3, warmup_steps=4), start=4, subgroup=pair)

    whole = fresh().steps(rank, range(11))
    equal = []
    for cut in cuts:
        before = fresh()
        before.steps(rank, range(cut))
        torch.save(before.state_dict(), buffer := io.BytesIO())
        buffer.seek(0)
        after = fresh()
        after.load_state_dict(torch.load(buffer, weights_only=True))
        assert after.state.iter == after.optimizer.averager.step == cut
        equal.append(all(map(torch.equal, after.steps(rank, range(cut, 11)), whole[cut:])))
    return equal


@pytest.mark.parametrize(("world", "cuts"), [(2, [2]), (4, [6])], ids=["in the warm-up", "in local training"])
def test_a_resume_is_bit_identical(world, cuts):
    # Torch's state cannot be saved: after a resume gradients are averaged over all ranks again. (The first
    # step after a resume has DDP's first buckets: a sum of four, not of two, then has another order.)
    assert not hasattr(Theirs.PostLocalSGDState(None, None, 3), "state_dict")
    assert run_ranks(resumed, world, cuts) == [[True]] * world


def test_states_are_pickled_without_their_groups():
    state = compat.PostLocalSGDState(None, None, 7, False)
    state.iter = 5
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert (again.iter, again.start_localSGD_iter, again.post_local_gradient_allreduce) == (5, 7, False)
    with pytest.raises(gl.InvalidValue, match="the state lacks iter; pass what"):
        state.load_state_dict({})
    with pytest.raises(gl.InvalidValue, match="iter=-1; use a whole number"):
        state.load_state_dict({"iter": -1})


def one_rank_loads(rank):
    """Rank 1 would average one step before rank 0, which would wait for it in DDP."""
    run = Run(compat, periodic(warmup_steps=3), start=3)
    if rank:
        run.optimizer.load_state_dict({**run.optimizer.state_dict(), "step": 1})
    with pytest.raises(gl.RanksDisagree, match="the ranks differ in step: rank 0 has 0, rank 1 has 1"):
        run.steps(rank, range(1))
    return True


def test_a_checkpoint_that_one_rank_has_not_loaded_is_found_in_the_first_step():
    assert run_ranks(one_rank_loads, 2) == [True, True]


# The optimizer


def an_optimizer_like_any_other(rank):
    model = torch.nn.Linear(3, 2)
    x = torch.ones(1, 3)

    def made(library):
        local = torch.optim.SGD(model.parameters(), lr=1.0)
        return library.PostLocalSGDOptimizer(local, library.PeriodicModelAverager(2, 1))

    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    torchs = made(Theirs)
    with pytest.raises(TypeError):
        torchs.step(closure)
    with pytest.raises(AttributeError):
        torchs.register_step_pre_hook(print)
    torchs.load_state_dict(torchs.state_dict())
    torchs.param_groups[0]["lr"] = 0.5  # as a scheduler does it
    assert torchs.optim.param_groups[0]["lr"] == 1.0  # and the local optimizer never learns of it

    optimizer = made(compat)
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(opt))
    before = model.weight[0, 0].item()
    loss = optimizer.step(closure)
    assert calls == ["before", optimizer]
    assert loss.item() == pytest.approx((model(x).sum() + 8).item(), abs=1e-5)  # it was before the step
    assert model.weight[0, 0].item() == pytest.approx(before - 1)
    assert optimizer.averager.step == 1

    saved = optimizer.state_dict()
    assert saved["step"] == 1
    optimizer.load_state_dict(saved)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 3.0})
    assert optimizer.param_groups is optimizer.optim.param_groups
    assert optimizer.state is optimizer.optim.state
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step(closure)
    scheduler.step()
    assert [group["lr"] for group in optimizer.optim.param_groups] == [0.5, 1.5]
    optimizer.zero_grad(set_to_none=False)
    assert not model.weight.grad.any()
    optimizer.zero_grad()
    assert model.weight.grad is None
    again = copy.deepcopy(optimizer)
    assert (again.averager.step, again.param_groups[1]["lr"]) == (2, 1.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "SGD" in repr(optimizer)

    optimizer.load_state_dict(torch.optim.SGD([*model.parameters()], lr=0.1).state_dict() | {
        "param_groups": saved["param_groups"] + [{**saved["param_groups"][0], "params": [2]}]
    })  # fmt: skip
    assert optimizer.averager.step == 0  # a plain optimizer's state: the averager begins
    with pytest.raises(gl.InvalidValue, match="step='x'; use a whole number of steps from 0 up"):
        optimizer.load_state_dict({**saved, "step": "x"})
    with pytest.raises(gl.WrongType, match=r"optim is a Linear; pass a torch.optim.Optimizer"):
        compat.PostLocalSGDOptimizer(model, optimizer.averager)
    with pytest.raises(
        gl.WrongType, match=r"averager is a torch\..*PeriodicModelAverager; pass a .* of gradlane"
    ):
        compat.PostLocalSGDOptimizer(optimizer.optim, torchs.averager)
    return True


def test_it_is_an_optimizer_like_any_other():
    assert run_ranks(an_optimizer_like_any_other, 1) == [True]


def scaled(rank, fused, unscale):
    """Local steps with a scaler. Power-of-two scales lose nothing; step 3 overflows on rank 1 alone."""

    def trained(scaler, overflow):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        local = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        optimizer = compat.PostLocalSGDOptimizer(local, periodic(period=3, warmup_steps=1))
        for step in range(5):
            optimizer.zero_grad()
            loss = model(data(rank, step, width=4)).square().mean()
            if overflow and step == 3 and rank == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
        return flat(model.parameters()), optimizer.averager.step, scaler.get_scale()

    off = trained(torch.amp.GradScaler("cpu", enabled=False), False)
    on = trained(torch.amp.GradScaler("cpu"), False)
    weights, step, scale = trained(torch.amp.GradScaler("cpu"), True)
    return torch.equal(off[0], on[0]), step, scale, all_equal(weights), bool(weights.isfinite().all())


@pytest.mark.parametrize(("fused", "unscale"), grid(
    (False, True), (False, True), quick=[(False, True), (True, False)]
))  # fmt: skip
def test_a_scaler_works_and_an_overflow_on_one_rank_does_not_part_the_ranks(fused, unscale):
    # torch's optimizer is not called in that step, so that rank averages one step later than the other
    for rank, (same, step, scale, together, finite) in enumerate(run_ranks(scaled, 2, fused, unscale)):
        assert same
        assert (step, together, finite) == (5, True, True)
        assert scale == 2.0 ** (16 - rank)
