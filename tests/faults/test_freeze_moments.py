"""What goes wrong with frozen moments is refused on all ranks, by name, and with nothing frozen."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW

import gradlane as gl
from gradlane.feed.adam_moments import is_frozen
from gradlane.local import run_ranks

from ..support.training import build, data

ONE_BIT = "ErrorFeedback(Gathered(Sign(block=32)))"


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def caught(call):
    try:
        call()
    except gl.GradlaneError as error:
        return type(error), str(error)
    return None


CALLS = {  # the optimizer and the arguments on rank 0, and on rank 1; the error, and words of it
    "after": (
        (AdamW, {"after": 3}),
        (AdamW, {"after": 4}),
        (gl.RanksDisagree, "the ranks differ in strategy: rank 0 has After(3, "),
    ),
    "refresh": (
        (AdamW, {"after": 3}),
        (AdamW, {"after": 3, "refresh": 16}),
        (gl.RanksDisagree, "refresh=16"),
    ),
    "then": (
        (AdamW, {"after": 3, "then": "Mean()"}),
        (AdamW, {"after": 3}),
        (gl.RanksDisagree, "SharedMomentum(Mean(), beta=0.9)"),
    ),
    "beta1": (
        (AdamW, {"after": 3}),
        (lambda p: AdamW(p, betas=(0.8, 0.999)), {"after": 3}),
        (gl.RanksDisagree, "the ranks differ in betas: rank 0 has [0.9, 0.999], rank 1 has [0.8, 0.999]"),
    ),
    "beta2": (
        (AdamW, {"after": 3}),
        (lambda p: AdamW(p, betas=(0.9, 0.99)), {"after": 3}),
        (gl.RanksDisagree, "the ranks differ in betas: rank 0 has [0.9, 0.999], rank 1 has [0.9, 0.99]"),
    ),
    "optimizer": (
        (AdamW, {"after": 3}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"after": 3}),
        (gl.WrongType, "rank 1: freeze_moments works with torch.optim.Adam and AdamW, got SGD"),
    ),
    "decay": (
        (lambda p: Adam(p, weight_decay=0.1), {"after": 3}),
        (lambda p: Adam(p, weight_decay=0.1), {"after": 3}),
        (gl.InvalidValue, "group 0 of Adam has weight_decay=0.1, which it adds to the gradient"),
    ),
    "a parameter that is missing": (
        (lambda p: AdamW(p[1:]), {"after": 3}),
        (AdamW, {"after": 3}),
        (gl.InvalidValue, "rank 0: scale is not in this optimizer"),
    ),
    "a parameter too many": (
        (AdamW, {"after": 3}),
        (lambda p: AdamW([*p, nn.Parameter(torch.zeros(7))]), {"after": 3}),
        (
            gl.InvalidValue,
            "rank 1: the optimizer has a parameter of shape [7] whose gradient this",
        ),
    ),
    "no warm-up": (
        (AdamW, {}),
        (AdamW, {}),
        (gl.InvalidValue, "after=None; use a whole number of warm-up steps from 1 up"),
    ),
    "never a refresh": (
        (AdamW, {"after": 3, "refresh": 0}),
        (AdamW, {"after": 3, "refresh": 0}),
        (gl.InvalidValue, "refresh=0 is not possible; use a whole number from 1 up, or None"),
    ),
    "momentum twice": (
        (AdamW, {"after": 3, "then": f"SharedMomentum({ONE_BIT})"}),
        (AdamW, {"after": 3}),
        (gl.InvalidValue, "SharedMomentum around SharedMomentum would apply momentum twice"),
    ),
    "no strategy": (
        (AdamW, {"after": 3, "then": 5}),
        (AdamW, {"after": 3}),
        (gl.WrongType, "rank 0: got a int, not a strategy"),
    ),
}


def call_all(rank):
    found = {}
    for name, (*calls, _) in CALLS.items():
        ddp = DistributedDataParallel(build())
        make, options = calls[rank]
        optimizer = make(trained(ddp))
        with gl.attach(ddp, "Mean()", timeout=30) as attachment:
            error = caught(lambda o=optimizer, a=attachment, k=options: gl.freeze_moments(o, a, **k))
            found[name] = error, gl.describe(attachment.strategy), is_frozen(optimizer)
            ddp(data(rank, 0)).backward()  # training goes on as before
            optimizer.step()
    return found


def test_calls_that_differ_or_are_wrong_are_refused_on_all_ranks():
    first, second = run_ranks(call_all, 2, deadline=120)
    assert first == second
    for name, (*_, (kind, words)) in CALLS.items():
        (error, message), strategy, frozen = first[name]
        assert (error, strategy, frozen) == (kind, "Mean()", False), name
        assert message.startswith("freeze_moments: "), name
        assert words in message, (name, message)


def step_of(ddp, optimizer, rank, step, own_loop=False):
    optimizer.zero_grad()
    ddp(data(rank, step)).backward()
    if own_loop:
        gl.reduce_gradients(ddp)
    optimizer.step()


def other_moments(rank, key, own_loop):
    """Before the freeze one rank's moment differs in one bit; then it is mended, and training goes on."""
    module = build()
    ddp = module if own_loop else DistributedDataParallel(module, bucket_cap_mb=0.004)
    optimizer = AdamW(trained(module), lr=1e-2)
    attachment = (gl.attach_without_ddp if own_loop else gl.attach)(ddp, "Mean()", timeout=30)
    gl.freeze_moments(optimizer, attachment, after=2, then=ONE_BIT)
    for step in range(2):
        step_of(ddp, optimizer, rank, step, own_loop)
    moment = optimizer.state[module.cube][key]
    right = moment.clone()
    if rank == 1:
        moment.view(torch.int32).view(-1)[5] ^= 1
    error = caught(lambda: step_of(ddp, optimizer, rank, 2, own_loop))
    frozen = is_frozen(optimizer)
    moment.copy_(right)
    for step in range(3, 5):
        step_of(ddp, optimizer, rank, step, own_loop)
    weights = torch.cat([p.detach().flatten() for p in trained(module)])
    attachment.close()
    return error, frozen, is_frozen(optimizer), weights


@pytest.mark.parametrize("own_loop", [False, True], ids=["ddp", "own loop"])
@pytest.mark.parametrize("key", ["exp_avg_sq", "exp_avg"])
def test_moments_that_differ_are_named_on_all_ranks(key, own_loop):
    results = run_ranks(other_moments, 3, key, own_loop)
    for (kind, message), frozen_then, frozen_now, weights in results:
        assert kind is gl.RanksDisagree
        assert f"before step 2 the optimizer's {key} of cube on rank 1 is not that of rank 0" in message
        assert "nothing is frozen" in message
        assert (frozen_then, frozen_now) == (False, True)
        assert torch.equal(weights, results[0][3])


def wrong_order(rank):
    """States of different steps, a swap, a schedule of betas, a group that comes late, a closure."""
    found = {}

    def start(**options):
        ddp = DistributedDataParallel(build())
        optimizer = AdamW(trained(ddp), lr=1e-2)
        attachment = gl.attach(ddp, "Mean()", timeout=30)
        gl.freeze_moments(optimizer, attachment, after=2, then=ONE_BIT, **options)
        return ddp, optimizer, attachment

    ddp, optimizer, attachment = start()
    step_of(ddp, optimizer, rank, 0)
    early, early_attachment = optimizer.state_dict(), attachment.state_dict()
    early = {"state": {k: dict(v) for k, v in early["state"].items()}, "param_groups": early["param_groups"]}
    early_groups = [dict(group) for group in early["param_groups"]]
    for step in range(1, 4):
        step_of(ddp, optimizer, rank, step)
    found["swap"] = caught(lambda: attachment.swap("Mean()"))
    optimizer.load_state_dict({"state": early["state"], "param_groups": early_groups})
    found["optimizer of an earlier step"] = caught(lambda: step_of(ddp, optimizer, rank, 4))

    ddp, optimizer, attachment = start()
    for step in range(3):
        step_of(ddp, optimizer, rank, step)
    attachment.load_state_dict(early_attachment)
    found["attachment of an earlier step"] = caught(lambda: step_of(ddp, optimizer, rank, 4))

    ddp, optimizer, attachment = start()
    for step in range(3):
        step_of(ddp, optimizer, rank, step)
    optimizer.param_groups[0]["betas"] = (0.95, 0.999)
    found["betas"] = caught(lambda: step_of(ddp, optimizer, rank, 3))

    ddp, optimizer, attachment = start()
    optimizer.param_groups[0]["betas"] = (0.95, 0.999)
    for step in range(2):
        step_of(ddp, optimizer, rank, step)
    found["betas before the freeze"] = caught(lambda: step_of(ddp, optimizer, rank, 2))

    ddp, optimizer, attachment = start()
    for step in range(3):
        step_of(ddp, optimizer, rank, step)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    found["a new group"] = caught(lambda: step_of(ddp, optimizer, rank, 3))

    ddp, optimizer, attachment = start(refresh=1)
    for step in range(3):
        step_of(ddp, optimizer, rank, step)
    found["closure"] = caught(lambda: optimizer.step(lambda: None))

    ddp, optimizer, attachment = start()
    for step in range(2):
        optimizer.zero_grad()
        ddp(data(rank, step)).backward()
    found["no step of the optimizer"] = caught(lambda: step_of(ddp, optimizer, rank, 2))

    ddp, optimizer, attachment = start()
    del optimizer
    found["deleted"] = caught(lambda: ddp(data(rank, 0)).backward())

    ddp = DistributedDataParallel(build())
    attachment = gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))", timeout=30)
    optimizer = AdamW(trained(ddp))
    found["memory in the warm-up"] = caught(lambda: gl.freeze_moments(optimizer, attachment, after=2))
    return found


WRONG = {
    "swap": "call freeze_moments again with another then=",
    "optimizer of an earlier step": "the optimizer's moments are not frozen, and the attachment, in step 4 "
    "with after=2, has the momentum: they are of different steps",
    "attachment of an earlier step": "the optimizer's moments are frozen, and the attachment, in step 1 with "
    "after=2, does not have the momentum",
    "betas": "group 0 has betas=(0.95, 0.999), and freeze_moments has set (0.0, ",
    "betas before the freeze": "beta1 of scale is 0.95 now, and was 0.9 when freeze_moments was called",
    "a new group": "group 1 was added after the moments were frozen",
    "closure": "run backward before optimizer.step(), or leave out refresh=",
    "no step of the optimizer": "the optimizer has made no step yet, and step 2 is to use its moments",
    "deleted": "the optimizer that was given to freeze_moments was deleted",
    "memory in the warm-up": "the strategy of the warm-up keeps ErrorFeedback.memory",
}


def test_what_does_not_fit_together_is_refused_with_the_way_out():
    for found in run_ranks(wrong_order, 2, deadline=120):
        for name, words in WRONG.items():
            assert found[name] is not None, name
            assert words in found[name][1], (name, found[name][1])


def uneven(rank, after, options):
    """Rank 1 runs out of data after 4 steps."""
    module = build()
    ddp = DistributedDataParallel(module)
    optimizer = AdamW(trained(module), lr=1e-2)
    attachment = gl.attach(ddp, "Mean()", timeout=30)
    gl.freeze_moments(optimizer, attachment, after=after, then=ONE_BIT)

    def run():
        with ddp.join(**options):
            for step in range(8 if rank == 0 else 4):
                step_of(ddp, optimizer, rank, step)

    error = caught(run)
    return error, torch.cat([p.detach().flatten() for p in trained(module)])


@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}], ids=["initial", "active"])
def test_a_rank_that_runs_out_of_data_after_the_freeze_takes_part(options):
    (error, first), (other, second) = run_ranks(uneven, 2, 2, options)
    assert error is None
    assert other is None
    assert torch.equal(first, second)
    assert first.abs().max() < 10


def running_out_early(rank):
    try:
        return uneven(rank, 6, {})[0]
    except RuntimeError as error:  # DDP wraps what it finds in a future
        return type(error), str(error)


@pytest.mark.slow
def test_a_rank_that_runs_out_of_data_before_the_freeze_is_an_error_on_all():
    """DDP does not show a joined rank the error of its step: that one raises when the others are gone."""
    (kind, message), (joined, _) = run_ranks(running_out_early, 2)
    assert kind is gl.WrongState
    assert "rank 1: the moments are to be frozen before step 6, and this rank ran out of data" in message
    assert issubclass(joined, RuntimeError)
