"""What goes wrong in local steps, and what becomes of it: on all ranks, without a trace."""

import json
import math
import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import gradlane as gl
from gradlane.local import RankFailed, run_ranks

from ..processes.test_local_steps import Small, sgd, train, weights
from ..support.catalogue import STRATEGIES
from ..support.training import build, data, replicas_equal
from .faulty import Broken, Faulty, Point
from .harness import drawing
from .test_raising import PHASES, STATEFUL


@dataclass
class Raises(gl.Strategy):
    """The strategy inside; in one round one rank raises, before or after it has sent."""

    inner: gl.Strategy
    rank: int
    round: int
    late: bool

    async def reduce(self, bucket):
        if bucket.step == self.round and bucket.rank == self.rank and not self.late:
            raise ZeroDivisionError("on purpose")
        reduced = await self.inner.reduce(bucket)
        if bucket.step == self.round and bucket.rank == self.rank:
            raise ZeroDivisionError("on purpose")
        return reduced


def a_failed_round(rank, late, delay):
    """State before and after the round that fails, and where training ends."""
    model = build(Small)
    optimizer = sgd(model.parameters())
    feedback = gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32)))
    local = gl.local_steps(model, optimizer, Raises(feedback, 1, 1, late), every=3, delay=delay, timeout=20)
    train(model, optimizer, rank, range(5 + delay))
    before = local.strategy.anchor.state_dict(), feedback.memory.state_dict()
    errors = []
    own = []
    for step in range(5 + delay, 6 + delay):
        optimizer.zero_grad()
        model(data(rank, step)).backward()
        try:
            optimizer.step()
        except gl.PeerFailed:
            errors.append("peer")
        except ZeroDivisionError:
            errors.append("mine")
        own = weights(model)
    after = local.strategy.anchor.state_dict(), feedback.memory.state_dict()
    unchanged = all(
        torch.equal(old[key], new[key]) for old, new in zip(before, after, strict=True) for key in old
    )
    moved = not replicas_equal([own])  # nobody was sent back to the anchor
    train(model, optimizer, rank, range(6 + delay, 10 + delay))
    local.finish()
    equal = replicas_equal([weights(model)])
    local.close()
    return errors, unchanged, moved, equal


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_round_that_fails_leaves_no_trace_and_loses_no_step(late, delay):
    outcomes = run_ranks(a_failed_round, 3, late, delay)
    assert [errors for errors, *_ in outcomes] == [["peer"], ["mine"], ["peer"]]
    for _, unchanged, moved, equal in outcomes:
        assert unchanged
        assert moved
        assert equal


def fail_in_rounds(rank, cases):
    """Per strategy and point: in which steps this rank raised what, and whether the ranks end together."""
    outcomes = []
    for name, point in cases:
        model = build(Small)
        optimizer = sgd(model.parameters())
        strategy = Faulty(STRATEGIES[name](), point)
        local = gl.local_steps(model, optimizer, strategy, every=2, bucket_mb=0.0005, timeout=20)
        caught = []
        for step in range(12):
            try:
                train(model, optimizer, rank, [step])
            except (Broken, gl.PeerFailed) as error:
                caught.append((step, type(error).__name__))
        local.finish()
        finite = bool(torch.isfinite(weights(model)).all())
        outcomes.append((caught, finite and replicas_equal([weights(model)]), local.local_steps))
        local.close()
    return outcomes


@pytest.mark.parametrize("parts", [len(PHASES), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", PHASES)
def test_every_kind_of_memory_survives_a_round_that_fails(phase, parts):
    """R5 for rounds: each strategy with a memory, one rank of three, at a drawn point. The quick suite
    deals them to the phases."""
    chance = drawing(f"raise in a round, {phase}")
    cases = [
        (name, Point.drawn(chance, 3, moments=PHASES[phase], steps=(0, 5), buckets=(0, -1)))
        for name in STATEFUL[list(PHASES).index(phase) % parts :: parts]
    ]
    outcomes = run_ranks(fail_in_rounds, 3, cases, deadline=60)
    for number, (name, point) in enumerate(cases):
        for rank in range(3):
            kind = "Broken" if rank == point.rank else "PeerFailed"
            expected = ([(2 * point.step + 1, kind)], True, 12)
            assert outcomes[rank][number] == expected, f"{name}, {point}"


def not_finite(rank):
    model = build(Small)
    optimizer = sgd(model.parameters())
    with gl.local_steps(model, optimizer, "ErrorFeedback(Sharded(Int4(block=32)))", every=2) as local:
        train(model, optimizer, rank, range(2))
        with local.agreed():
            anchor = weights(model)
        for step in (2, 3):
            optimizer.zero_grad()
            model(data(rank, step) * (float("nan") if rank == 1 and step == 3 else 1.0)).backward()
            optimizer.step()
        back = torch.equal(weights(model), anchor)
        train(model, optimizer, rank, range(4, 8))
        skipped = local.metrics()["comm/skipped"]
    finite = bool(torch.isfinite(weights(model)).all())
    return back, skipped, finite, replicas_equal([weights(model)])


def test_ranks_go_back_when_one_has_learned_something_not_finite():
    assert run_ranks(not_finite, 3) == [(True, 1, True, True)] * 3


def diverging(rank, nonfinite):
    """NaN in every step of rank 1."""
    model = build(Small)
    optimizer = sgd(model.parameters())
    with gl.local_steps(model, optimizer, "Mean()", every=1, nonfinite=nonfinite):
        for step in range(20):
            optimizer.zero_grad()
            model(data(rank, step) * (math.nan if rank == 1 else 1.0)).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("nonfinite", "message"),
    [
        ("skip", "round 10: the agreed weight of buffers and 6 more is not finite, after 10 skipped rounds"),
        ("raise", "round 0: the agreed weight of buffers and 6 more is not finite; memory is as before"),
    ],
)
def test_messages_speak_of_rounds_and_weights(nonfinite, message):
    with pytest.raises(RankFailed) as caught:
        run_ranks(diverging, 3, nonfinite)
    assert str(caught.value).count(f"NonFinite: {message}") == 3, str(caught.value)


def overflowing(rank, warmup, told):
    """torch's own scaler; rank 1 overflows in steps 1 and 5, rank 2 in step 7."""
    model = build(Small)
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options = {"scaler": scaler} if told else {}
    with gl.local_steps(
        model, optimizer, "Mean()", every=3, warmup=warmup, timeout=20, nonfinite="skip", **options
    ) as local:
        for step in range(10):
            optimizer.zero_grad()
            bad = (rank, step) in ((1, 1), (1, 5), (2, 7))
            loss = model(data(rank, step)) * (math.inf if bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        steps, rounds = local.local_steps, local.step
    finite = bool(torch.isfinite(weights(model)).all())
    return steps, rounds, replicas_equal([weights(model)]), finite, "step" in vars(scaler)


@pytest.mark.parametrize(("warmup", "rounds"), [(0, 3), (4, 2)])
def test_rounds_stay_together_when_a_scaler_leaves_out_steps(warmup, rounds):
    assert run_ranks(overflowing, 3, warmup, True) == [(10, rounds, True, True, False)] * 3


def test_ranks_with_other_counts_are_told_apart():
    with pytest.raises(RankFailed) as caught:
        run_ranks(overflowing, 3, 0, False)
    text = str(caught.value)
    assert text.count("RanksDisagree: round 2: the ranks do not come to this round together") == 3
    assert "rank 0 after 9 local steps, rank 1 after 8 local steps in finish()" in text
    assert "pass it as scaler=" in text


def differing(rank, what):
    model = build(Small, seed=rank if what == "weights" else 0)
    optimizer = sgd(model.parameters())
    options = {"every": 2 + (what == "every" and rank)}
    with gl.local_steps(model, optimizer, "Mean()", timeout=20, **options):
        train(model, optimizer, rank, range(4))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("every", "every=3"),
        ("weights", "rank 1, 2 began with other weights than the others"),
    ],
)
def test_ranks_that_differ_raise(what, message):
    with pytest.raises(RankFailed) as caught:
        run_ranks(differing, 3, what)
    assert str(caught.value).count("RanksDisagree") >= 3
    assert message in str(caught.value)


def killed(rank):
    model = build(Small)
    optimizer = sgd(model.parameters())
    gl.local_steps(model, optimizer, "ErrorFeedback(Sharded(Int4(block=32)))", every=4, timeout=30)
    began = time.monotonic()
    try:
        for step in range(40):
            if rank == 1 and step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, rank, [step])
    except gl.PeerLost as error:
        gl.local_reports = (step, str(error))  # seen by the parent through the failure below
        raise RuntimeError(f"lost in step {step} after {time.monotonic() - began:.1f} s: {error}") from None


def test_the_others_learn_of_a_killed_rank_in_their_next_round():
    with pytest.raises(RankFailed) as caught:
        run_ranks(killed, 3)
    text = str(caught.value)
    assert "rank 1: ended by SIGKILL" in text
    assert text.count("RuntimeError: lost in step 7") == 2


def wrong_calls(rank):
    """The messages of calls that make no sense."""
    model = build(Small)
    optimizer = sgd(model.parameters())
    messages = []

    def attempt(call):
        try:
            call()
        except gl.GradlaneError as error:
            messages.append(str(error))

    other = sgd(nn.Linear(2, 2).parameters())
    attempt(lambda: gl.local_steps(model, optimizer, "Mean()"))
    attempt(lambda: gl.local_steps(model, optimizer, "Mean()", every=0))
    attempt(lambda: gl.local_steps(model, optimizer, "Mean()", every=8, fragments=3))
    attempt(lambda: gl.local_steps(model, optimizer, "Mean()", every=8, fragments=4, delay=2))
    attempt(lambda: gl.local_steps(model, optimizer, "Noop()", every=8))
    attempt(lambda: gl.local_steps(model, "sgd", "Mean()", every=8))
    attempt(lambda: gl.local_steps(model, other, "Mean()", every=8))
    attempt(lambda: gl.local_steps(model, optimizer, "LocalSteps(Mean())", every=8))
    attempt(lambda: gl.reduce_gradients(model, "LocalSteps(Mean())"))
    with gl.local_steps(model, optimizer, "Mean()", every=2) as local:
        attempt(lambda: gl.local_steps(model, optimizer, "Mean()", every=8))
        attempt(lambda: gl.freeze_moments(optimizer, local, after=2))
        with local.agreed():
            attempt(optimizer.step)
            attempt(local.finish)
        train(model, optimizer, rank, range(3))
    attempt(local.finish)
    attempt(lambda: gl.local_steps(model, optimizer, "Mean()", every=2, bucket_mb="25"))
    return messages


def test_calls_that_make_no_sense_say_what_does():
    expected = [
        "needs every=", "every=0", "no multiple of fragments=3", "delay=2 is too long", "Noop", "torch.optim",
        "no parameter of this model", "has its options in itself", "local_steps(model, optimizer, strategy)",
        "has local steps already", "local steps send no gradients", "inside of agreed()",
        "finish inside of agreed()", "closed", "bucket_mb='25'",
    ]  # fmt: skip
    for messages in run_ranks(wrong_calls, 2):
        assert len(messages) == len(expected), messages
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def scale_of(rank, text):
    """What a checkpoint with another state of the scaler leads to."""
    model = build(Small)
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with gl.local_steps(model, optimizer, "Mean()", every=2, scaler=scaler) as local:
        scaler.scale(model(data(rank, 0))).backward()
        scaler.step(optimizer)
        scaler.update()
        state = local.state_dict()
        assert json.loads(state["state"]["local"]["scaler"])["scale"] == 64.0
        if text is not None:
            state["state"]["local"]["scaler"] = text
        scaler.update(2.0)
        try:
            local.load_state_dict(state)
        except gl.InvalidValue as error:
            return str(error)[:40], scaler.get_scale()
    return scaler.get_scale()


@pytest.mark.parametrize("text", ["", "[1]", '{"scale": "x"}', '{"scale": NaN}', '{"scale": -1}', "3"])
def test_a_damaged_scale_is_refused(text):
    assert run_ranks(scale_of, 2, text) == [("its state of the GradScaler is damaged: "[:40], 2.0)] * 2


def test_a_checkpoint_has_the_scale_of_each_rank():
    assert run_ranks(scale_of, 2, None) == [64.0, 64.0]
