"""attach, swap, state, close: the life of an attachment, and every way to get it wrong."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.catalogue import MajorityVote
from ..support.training import build, data, flat, replicas_equal


def refused(rank, case):
    """Rank 1 differs in one thing; the error every rank gets."""
    odd = rank == 1
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    strategy = gl.Cast(gl.Mean(), torch.float16)
    if case == "dtype option":
        strategy = gl.Cast(gl.Mean(), torch.bfloat16 if odd else torch.float16)
    elif case == "number option":
        strategy = gl.After(11 if odd else 10, then=gl.Mean())
    elif case == "other strategy":
        strategy = gl.Mean() if odd else gl.Noop()
    elif case == "user option":
        strategy = MajorityVote(0.1 if odd else 0.2)
    elif case == "route order":
        rules = {"a": gl.Mean(), "b": gl.Noop()}
        strategy = gl.Route(dict(reversed(rules.items())) if odd else rules)
    elif case == "parameter name":
        module = nn.ModuleDict({"one" if odd else "two": module})
    elif case == "requires_grad":
        module.register_parameter("extra", nn.Parameter(torch.ones(2), requires_grad=False))
        module.extra.requires_grad_(False)
    ddp = DistributedDataParallel(module)
    if case == "requires_grad" and odd:
        ddp.module.extra.requires_grad_(True)
    if case == "version" and odd:
        gl.session.opening.__version__ = "9.9.9"
    try:
        gl.attach(ddp, strategy, timeout=10)
    except gl.RanksDisagree as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("dtype option", "strategy: rank 0 has Cast(Mean(), float16), rank 1 has Cast(Mean(), bfloat16)"),
        (
            "number option",
            "strategy: rank 0 has After(10, Mean(), first=Mean(), refresh=None), rank 1 has ",
        ),
        ("other strategy", "strategy: rank 0 has Noop(), rank 1 has Mean()"),
        ("user option", "MajorityVote(step_size=0.2), rank 1 has MajorityVote(step_size=0.1)"),
        (
            "route order",
            "rank 0 has Route({'a': Mean(), 'b': Noop()}, otherwise=Mean()), rank 1 has Route({'b'",
        ),
        (
            "parameter name",
            "parameters: rank 0 has two.0.weight [4, 4] float32 trained, rank 1 has one.0.weight",
        ),
        (
            "requires_grad",
            "parameters: rank 0 has extra [2] float32 frozen, rank 1 has extra [2] float32 trained",
        ),
        ("version", "version: rank 0 has"),
    ],
)
def test_ranks_that_differ_are_refused_everywhere(case, says):
    answers = run_ranks(refused, 3, case)
    assert answers[0] == answers[1] == answers[2]
    assert says in answers[0]


def weights_may_differ(rank):
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, gl.WeightedMean(1.0 + rank), timeout=10):
        ddp(data(rank, 0)).backward()
    return replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])


def test_weights_are_a_ranks_own():
    assert run_ranks(weights_may_differ, 2) == [True, True]


def forgotten(rank):
    ddp = DistributedDataParallel(build())
    if rank == 0:
        with pytest.raises(gl.PeerLost, match="attach: rank 1 did not take part within 1 s") as caught:
            gl.attach(ddp, "Mean()", timeout=1)
        return caught.value.rank
    return None


def test_a_rank_that_does_not_attach_is_named():
    assert run_ranks(forgotten, 2) == [1, None]


def wrong_use(rank):
    module = build()
    with pytest.raises(
        gl.WrongType, match="needs a DistributedDataParallel model, got Awkward; wrap it first"
    ):
        gl.attach(module, gl.Mean())
    ddp = DistributedDataParallel(module)
    for given, message in [
        (torch_hooks.allreduce_hook, r"got the function 'allreduce_hook'.*ddp.register_comm_hook"),
        (gl.Mean, r"got the class Mean; write Mean\(\.\.\.\)"),
        (3, "got a int, not a strategy"),
    ]:
        with pytest.raises(gl.WrongType, match=message):
            gl.attach(ddp, given)
    with pytest.raises(gl.InvalidValue, match=r"'Maen' .* did you mean Mean"):
        gl.attach(ddp, "Maen()")
    for option, value, message in [
        ("timeout", 0, "timeout=0 leaves no time"),
        ("timeout", float("nan"), "timeout=nan leaves no time"),
        ("timeout", timedelta(seconds=-1), "timeout=-1 leaves no time"),
        ("timeout", float("inf"), "timeout=inf never ends; use at most 2592000 s"),
        ("ranks_per_node", 0, "ranks_per_node=0 is not possible"),
        ("ranks_per_node", 1.0, "ranks_per_node=1.0 is not possible"),
    ]:
        with pytest.raises(gl.InvalidValue, match=message):
            gl.attach(ddp, "Mean()", **{option: value})
    with pytest.raises(gl.WrongType, match="timeout='60' is no time"):
        gl.attach(ddp, "Mean()", timeout="60")
    attachment = gl.attach(ddp, "Mean()")
    with pytest.raises(gl.WrongState, match=r"use attachment.swap"):
        gl.attach(ddp, "Mean()")
    with pytest.raises(gl.WrongType, match="got a int"):
        attachment.swap(3)
    attachment.close()
    attachment.close()
    for call in (lambda: attachment.swap("Mean()"), lambda: attachment.load_state_dict({})):
        with pytest.raises(gl.WrongState, match="this attachment is closed"):
            call()
    with pytest.raises(gl.WrongState, match="attach again before you continue to train"):
        ddp(data(rank, 0)).backward()
    # ... and after attaching again the model is as good as new
    with gl.attach(ddp, "Mean()") as again:
        ddp.zero_grad()
        ddp(data(rank, 0)).backward()
        assert again.metrics()["comm/steps"] == 1
        assert "Mean()" in repr(again)
    assert "closed" in repr(again)

    hooked = DistributedDataParallel(build())
    hooked.register_comm_hook(None, torch_hooks.allreduce_hook)
    with pytest.raises(gl.WrongState, match="DDP has the hook 'allreduce_hook' registered"):
        gl.attach(hooked, "Mean()")
    return True


def test_wrong_use_is_told_what_to_do():
    assert run_ranks(wrong_use, 2) == [True, True]


def saved_after_close(rank, folder):
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, "ErrorFeedback(Gathered(TopK(0.2)))") as attachment:
        ddp(data(rank, 0)).backward()
    attachment.save(folder)
    before = attachment.strategy.state_dict()["memory"]
    with gl.attach(ddp, "ErrorFeedback(Gathered(TopK(0.2)))") as again:
        again.load(folder)
        after = again.strategy.state_dict()["memory"]
        same = before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        return again.step, same, any(residual.any() for residual in before.values())


def test_what_a_closed_attachment_remembers_can_be_saved(tmp_path):
    assert run_ranks(saved_after_close, 2, str(tmp_path / "saved")) == [(1, True, True)] * 2


def test_attach_before_init():
    with pytest.raises(gl.WrongState, match=r"call torch.distributed.init_process_group first"):
        gl.attach(build(), gl.Mean())


def sparse_where_it_cannot_work(rank):
    from ..support.training import SparseLookup

    messages = []
    for strategy in (gl.Cast(gl.Mean(), torch.float16), gl.WeightedMean(1.0)):
        ddp = DistributedDataParallel(build(SparseLookup))
        with gl.attach(ddp, strategy, timeout=10) as attachment:
            with pytest.raises(gl.GradlaneError) as caught:
                ddp(data(rank, 0)).backward()
            messages.append(str(caught.value))
            attachment.swap(gl.Route({"table.weight": gl.Mean()}, otherwise=strategy))
            ddp.zero_grad()
            ddp(data(rank, 0)).backward()
        assert replicas_equal([p.grad for p in ddp.parameters()])
    return messages


def test_sparse_gradients_where_they_cannot_work():
    for cast, weighted in run_ranks(sparse_where_it_cannot_work, 2):
        assert "Cast cannot carry the sparse gradient of 'table.weight'" in cast
        assert "WeightedMean cannot carry the sparse gradient of 'table.weight'" in weighted


def swapping(rank):
    events = []
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, "Mean()", observer=events.append, timeout=10) as attachment:
        for step in range(6):
            if step == 3:
                attachment.swap("Cast(Mean(), bfloat16)")
            ddp(data(rank, step)).backward()
        bytes_by_step = [e.payload_bytes for e in events]
        try:
            attachment.swap("Mean()" if rank else "Noop()")
        except gl.RanksDisagree as error:
            kept = (str(error), gl.describe(attachment.strategy))
        ddp(data(rank, 7)).backward()
    return bytes_by_step, kept


def test_swap_takes_effect_at_one_step_or_nowhere():
    for bytes_by_step, (message, strategy) in run_ranks(swapping, 2):
        assert bytes_by_step[:3] == [bytes_by_step[0]] * 3
        assert bytes_by_step[3:] == [bytes_by_step[0] // 2] * 3
        assert "swap: the ranks differ in strategy: rank 0 has Noop(), rank 1 has Mean()" in message
        assert strategy == "Cast(Mean(), bfloat16)"


class Momentum(gl.Strategy):
    """A strategy with memory, to see it saved and restored."""

    def __init__(self):
        self.memory = gl.Memory()

    async def reduce(self, bucket):
        memory = self.memory.like(bucket).mul_(0.9).add_(bucket.flat)
        return gl.Reduced(await gl.all_reduce(memory.clone()))


def resuming(rank, path):
    """Four steps at once, against two, a checkpoint, a new model, and two more."""

    def run(steps, module, state=None, first=0):
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with gl.attach(ddp, gl.After(1, then=Momentum()), timeout=10) as attachment:
            if state is not None:
                attachment.load_state_dict(state)
                assert attachment.step == first
            for step in range(first, first + steps):
                optimizer.zero_grad()
                ddp(data(rank, step)).backward()
                optimizer.step()
            return ddp.module, attachment.state_dict()

    whole, _ = run(5, build())
    half, state = run(3, build())
    torch.save({"model": half.state_dict(), "comm": state}, f"{path}/rank{rank}.pt")
    saved = torch.load(f"{path}/rank{rank}.pt", weights_only=True)
    fresh = build(seed=5)
    fresh.load_state_dict(saved["model"])
    resumed, _ = run(2, fresh, saved["comm"], first=3)
    return torch.equal(flat(whole.parameters()), flat(resumed.parameters())), sorted(saved["comm"])


def test_resume_is_bit_identical(tmp_path):
    for equal, keys in run_ranks(resuming, 2, str(tmp_path)):
        assert equal
        assert keys == ["format", "layout", "state", "step", "strategy"]


def bad_states(rank):
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, "Mean()") as attachment:
        good = attachment.state_dict()
        for change, message in [
            ({"strategy": "Noop()"}, r"saved by Noop\(\), this attachment runs Mean\(\)"),
            ({"format": 99}, "format 99, this version reads 1 and 2"),
            ({"step": -1}, "step -1; a step is a whole number from 0 up"),
            ({"step": True}, "step True; a step is a whole number from 0 up"),
            ({"state": {"memory": {}}}, "Mean has no state called memory"),
            ({"state": [1]}, "the state is a list; pass what state_dict"),
        ]:
            with pytest.raises(gl.InvalidValue, match=message):
                attachment.load_state_dict({**good, **change})
        with pytest.raises(gl.InvalidValue, match="the state lacks format, state, step, strategy"):
            attachment.load_state_dict({})
        attachment.load_state_dict(good)
    return states_of_another_model(rank)


class Fussy:
    """State that refuses whatever is given to it."""

    def state_dict(self):
        return {"mood": 1}

    def load_state_dict(self, state):
        if state != self.state_dict():
            raise gl.InvalidValue("not in the mood")


class TwoStates(Momentum):
    """A memory that is loaded first, and a state that may refuse then."""

    def __init__(self):
        super().__init__()
        self.second = Fussy()


def states_of_another_model(rank):
    """Refused when they are given, not in the next step; and nothing has changed."""
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, TwoStates()) as attachment:
        ddp(data(rank, 0)).backward()
        good = attachment.state_dict()
        name, memory = next(iter(good["state"]["memory"].items()))
        for tensor, message in [
            (torch.zeros(3, 3, 3), "has shape"),
            (torch.full_like(memory, torch.nan), "not finite"),
            (torch.zeros_like(memory, dtype=torch.int32), "floating-point"),
        ]:
            state = {**good["state"], "memory": {**good["state"]["memory"], name: tensor}}
            with pytest.raises(gl.InvalidValue, match=rf"memory: '{name}' .*{message}.*for the same model"):
                attachment.load_state_dict({**good, "state": state})
        zeros = {name: torch.zeros_like(tensor) for name, tensor in good["state"]["memory"].items()}
        with pytest.raises(gl.InvalidValue, match="not in the mood"):
            attachment.load_state_dict({**good, "state": {"memory": zeros, "second": {"mood": 2}}})
        after = attachment.state_dict()["state"]["memory"]
        return all(torch.equal(after[name], kept) for name, kept in good["state"]["memory"].items())


def test_states_that_do_not_fit_are_refused():
    assert run_ranks(bad_states, 2) == [True, True]


def lane_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradlane-")]


def kernel_threads():
    from pathlib import Path

    return sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())


def descriptors():
    import os

    return len(os.listdir("/proc/self/fd"))


def one_life(rank, store, cycle):
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(cycle), store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    ddp = DistributedDataParallel(build(depth=2), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = gl.attach(ddp, "Cast(Mean(), bfloat16)", timeout=20)
    for step in range(3):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
        optimizer.step()
    attachment.close()


def many_lives(rank, path, cycles):
    store = dist.FileStore(path, 2)
    for cycle in range(cycles):
        one_life(rank, store, cycle)
        gl.shutdown()
        if cycle == 4:
            before = descriptors(), kernel_threads()
    return before, (descriptors(), kernel_threads()), lane_threads()


@pytest.mark.parametrize("cycles", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_many_lives_leave_nothing_behind(cycles):
    for before, after, lanes in run_ranks(many_lives, 2, cycles, init=False, deadline=120):
        assert lanes == []
        assert after == before
        assert not [name for name in after[1] if "gloo" in name]


def tried_again(rank):
    """Rank 0 is refused for what it gave before it meets the others; then all do it right."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    try:
        gl.attach(ddp, "Mean(" if rank == 0 else "Mean()", timeout=1)
    except (gl.InvalidValue, gl.PeerLost) as error:
        first = type(error).__name__
    dist.barrier()
    with gl.attach(ddp, "Mean()", timeout=20):
        ddp(torch.full((1, 4), rank + 1.0)).sum().backward()
    return first, flat([p.grad for p in ddp.parameters()])


def test_attach_again_after_one_rank_never_came():
    first, grads = zip(*run_ranks(tried_again, 2), strict=True)
    assert first == ("InvalidValue", "PeerLost")
    assert torch.equal(grads[0], grads[1])


def saved_in_backward(rank):
    """state_dict in the middle of a step would end it; the step itself goes on."""
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), bucket_cap_mb=0.001)
    found = []
    with gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))", timeout=20) as attachment:

        def save(gradient):
            with pytest.raises(gl.WrongState, match="state_dict in the middle of a step"):
                attachment.state_dict()
            found.append(attachment.step)

        for step in range(3):
            if step == 1:  # from now on DDP has one bucket for each layer
                ddp.module[0].weight.register_hook(save)
            ddp(torch.ones(2, 32)).sum().backward()
        return found, attachment.step


def test_state_dict_in_backward_is_refused():
    assert run_ranks(saved_in_backward, 2) == [([1, 2], 3)] * 2
