"""Local steps with Adam: a cheap warm-up, second moments that all ranks share, and what may spoil them."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import RankFailed, run_ranks
from gradlane.with_optimizer import attach_with_optimizer

from ..support.training import build, data, flat, replicas_equal
from .test_local_steps import Small, adam, sgd, train, weights

FROZEN = {"every": 3, "warmup": 4, "moments": "frozen"}
INT4 = "ErrorFeedback(Sharded(Int4(block=32)))"


def second_moments(optimizer):
    return flat([state["exp_avg_sq"] for state in optimizer.state.values()])


def by_hand(rank, ddp, own_call):
    """``moments="frozen"``, or the user's own call at the same step; the second moments of both ends."""
    model = build(Small)
    model = DistributedDataParallel(model) if ddp else model
    optimizer = adam(model.parameters())
    options = {**FROZEN, "moments": "own"} if own_call else FROZEN
    with gl.local_steps(model, optimizer, INT4, **options):
        train(model, optimizer, rank, range(4))
        if own_call:
            gl.freeze_moments(optimizer)
        at_freeze = second_moments(optimizer)
        train(model, optimizer, rank, range(4, 12))
        parted = not replicas_equal(model.parameters())
        kept = torch.equal(second_moments(optimizer), at_freeze)
    return weights(model), parted, kept, replicas_equal([weights(model)])


@pytest.mark.parametrize("ddp", [False, True])
def test_the_second_moment_is_frozen_at_the_end_of_the_warm_up(ddp):
    found, expected = (run_ranks(by_hand, 3, ddp, own_call) for own_call in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:] == (True, True, True)


def warmed_up_in_int8(rank, ddp):
    """Together in the warm-up, by int8; the bytes of both halves; and what a plain Mean() ends with."""
    ends, figures = [], {}
    for first in ("Sharded(Int8(block=32))", "Mean()"):
        model = build(Small)
        model = DistributedDataParallel(model) if ddp else model
        optimizer = adam(model.parameters())
        with gl.local_steps(model, optimizer, INT4, every=2, warmup=3, first=first, buffers="own") as local:
            train(model, optimizer, rank, range(3))
            together = replicas_equal(model.parameters())
            warm = local.metrics()["local/bytes_per_step"]
            train(model, optimizer, rank, range(3, 6))
            figures[first] = together, warm, local.local_steps
        ends.append(flat(model.parameters()))
    return figures, (ends[0] - ends[1]).abs().max().item(), replicas_equal([ends[0]])


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_warm_up_in_int8_costs_a_fraction_of_the_bytes(world, ddp):
    for figures, apart, equal in run_ranks(warmed_up_in_int8, world, ddp):
        narrow, dense = figures.values()
        assert (narrow[0], narrow[2]) == (dense[0], dense[2]) == (True, 6)
        assert dense[1] / 4 < narrow[1] < dense[1] / 2.5  # a scale for each block of 32
        assert 0 < apart < 0.2
        assert equal


def resumed(rank, folder, resume, save_at):
    model = build(Small)
    optimizer = adam(model.parameters())
    first = "Sharded(Int8(block=32))"
    local = gl.local_steps(model, optimizer, INT4, **FROZEN, first=first, timeout=20)
    if resume:
        local.load(folder)
    for step in range(local.local_steps, 12):
        train(model, optimizer, rank, [step])
        if step + 1 == save_at and not resume:
            local.save(folder)
    own = weights(model), second_moments(optimizer)
    local.close()
    return own


@pytest.mark.parametrize("save_at", [2, 4, 6, 8])
def test_frozen_rounds_go_on_bit_for_bit_in_new_processes(tmp_path, save_at):
    """Saved in the warm-up, at its end, and in the middle of a round."""
    through, again = (run_ranks(resumed, 3, str(tmp_path), resume, save_at) for resume in (False, True))
    for one, other in zip(through, again, strict=True):
        assert all(map(torch.equal, one, other))


class Gated(nn.Module):
    """Half of the rows of ``a`` never have a gradient."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(24, 12)

    def forward(self, x):
        return self.a(x)[:, :6].square().mean()


def a_bad_batch(rank, step):
    """NaN on rank 1 in the middle of a round: all go back, with moments that work, and masks in place."""
    model = build(Gated)
    optimizer = adam(model.parameters())
    with gl.local_steps(model, optimizer, INT4, **FROZEN) as local:
        train(model, optimizer, rank, range(step))
        before = second_moments(optimizer)
        optimizer.zero_grad()
        (model(data(rank, step)) * (math.nan if rank == 1 else 1.0)).backward()
        optimizer.step()
        train(model, optimizer, rank, range(step + 1, 15))
        skipped = local.metrics()["comm/skipped"]
        after = second_moments(optimizer)
    finite = bool(torch.isfinite(weights(model)).all())
    moved = (model.a.weight[:6] - build(Gated).a.weight[:6]).abs().max().item()
    return skipped, torch.equal(before, after), finite, replicas_equal([weights(model)]), moved


@pytest.mark.parametrize("step", [4, 8])
def test_a_batch_that_is_not_finite_does_not_spoil_frozen_moments(step):
    for skipped, same, finite, equal, moved in run_ranks(a_bad_batch, 3, step):
        assert (skipped, same, finite, equal) == (1, True, True, True)
        assert moved < 1.0  # a second moment of 0 would be a step of lr / eps


def frozen_apart(rank):
    """Frozen by hand where the ranks have already parted."""
    model = build(Small)
    optimizer = adam(model.parameters())
    with gl.local_steps(model, optimizer, "Mean()", every=3, timeout=20):
        train(model, optimizer, rank, range(2))
        gl.freeze_moments(optimizer)
        train(model, optimizer, rank, range(2, 4))


def test_second_moments_that_differ_are_an_error_on_all_ranks():
    with pytest.raises(RankFailed) as caught:
        run_ranks(frozen_apart, 3)
    assert str(caught.value).count("has frozen other second moments than the others") == 3


def wrong_calls(rank):
    model = build(Small)
    messages = []

    def attempt(optimizer, strategy="Mean()", *, closure=False, **options):
        try:
            with gl.local_steps(model, optimizer, strategy, **options) as local:
                optimizer.step(*([lambda: None] if closure else []))
                local.local_steps = 0  # finish() has nothing to bring together
        except gl.GradlaneError as error:
            messages.append(str(error))

    attempt(sgd(model.parameters()), **FROZEN)
    attempt(adam(model.parameters()), **{**FROZEN, "warmup": 0})
    attempt(adam(model.parameters()), every=2, warmup=2, first="ErrorFeedback(Sharded(Int8()))")
    attempt(adam(model.parameters()), every=2, first="Sharded(Int8())")
    attempt(adam(model.parameters()), every=2, warmup=2, closure=True)
    attempt(adam(model.parameters()), "LocalSteps(Mean())", moments="frozen")
    beta = "After(3, SharedMomentum(Sharded(Sign()), beta=0.5))"
    ddp = DistributedDataParallel(model)
    for strategy in (beta, "LocalSteps(Mean(), every=2)"):
        try:
            attach_with_optimizer(ddp, adam(model.parameters()) if strategy == beta else None, strategy)
        except gl.GradlaneError as error:
            messages.append(str(error))
    return messages


def test_calls_that_make_no_sense_say_what_does():
    expected = [
        "works with torch.optim.Adam and AdamW, got SGD",
        "warmup is 0; use a tenth of the training",
        "keeps ErrorFeedback.memory, which nobody would send",
        "warmup is 0; set warmup= too",
        "optimizer.step(closure) computes gradients when it is too late",
        "has its options in itself",
        "beta=0.5, and Adam has 0.9",
        "counts the steps of a torch.optim.Optimizer, got NoneType",
    ]
    for messages in run_ranks(wrong_calls, 2):
        assert len(messages) == len(expected), messages
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def one_line(rank, strategy):
    """A text says all: where the moments end, and whether the ranks are together."""
    ddp = DistributedDataParallel(build(Small))
    optimizer = adam(ddp.parameters())
    with attach_with_optimizer(ddp, optimizer, strategy, timeout=20):
        train(ddp, optimizer, rank, range(7))
    return replicas_equal(ddp.module.parameters()), optimizer.param_groups[0]["betas"][0]


@pytest.mark.parametrize(
    ("strategy", "beta1"),
    [
        ("After(3, SharedMomentum(ErrorFeedback(Sharded(Sign(block=32)))), Sharded(Int8(block=32)))", 0.0),
        ("LocalSteps(Mean(), every=2, warmup=3, moments='frozen')", 0.9),
        ("Cast(Mean(), bfloat16)", 0.9),
    ],
)
def test_one_text_for_a_strategy_and_what_it_does_to_the_optimizer(strategy, beta1):
    assert run_ranks(one_line, 3, strategy) == [(True, beta1)] * 3
