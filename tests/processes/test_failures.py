"""A rank that raises, dies or stalls: every rank hears of it within the step, and training goes on."""

import os
import random
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import RankFailed, run_ranks

from ..support.training import build, data, flat, replicas_equal

SMALL = {"bucket_cap_mb": 0.004}


class Broken(Exception):
    """An error of the strategy's own, so that its type can be told from all others."""


@dataclass
class Fails(gl.Strategy):
    """Raises at some (rank, step, bucket, phase): before, between or after its collectives.

    Bucket -1 is the last one.
    """

    places: list[tuple[int, int, int, int]]

    async def reduce(self, bucket):
        self.check(bucket, 0)
        total = await gl.all_reduce(bucket.flat, op="sum")
        self.check(bucket, 1)
        (scale,), *_ = await gl.all_gather((torch.full((1,), float(bucket.world)),))
        self.check(bucket, 2)
        return gl.Reduced(total / scale)

    def check(self, bucket, phase):
        indices = {bucket.index, -1} if bucket.is_last else {bucket.index}
        if any((bucket.rank, bucket.step, index, phase) in self.places for index in indices):
            raise Broken(f"on purpose in phase {phase}")


def fail_at(rank, places):
    """Twelve steps; what was caught, whether the replicas are equal, and how long the worst step took."""
    ddp = DistributedDataParallel(build(), **SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    caught = []
    slowest = 0.0
    with gl.attach(ddp, Fails(places), timeout=20):
        for step in range(12):
            optimizer.zero_grad()
            start = time.monotonic()
            try:
                ddp(data(rank, step)).backward()
            except (Broken, gl.PeerFailed) as error:
                caught.append((step, type(error).__name__, str(error), getattr(error, "__notes__", [])))
                slowest = max(slowest, time.monotonic() - start)
                continue
            optimizer.step()
    return caught, replicas_equal(ddp.parameters()), slowest


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("bucket", "phase"), [(0, 0), (1, 1), (1, 2), (-1, 0), (-1, 1), (-1, 2)])
def test_an_error_reaches_every_rank_in_its_step(world, bucket, phase):
    who = world - 1
    outcomes = run_ranks(fail_at, world, [(who, 2, bucket, phase)])
    for rank, (caught, equal, slowest) in enumerate(outcomes):
        assert equal
        assert slowest < 5  # at once, not after the time-out of 20 s
        ((step, kind, message, notes),) = caught
        assert step == 2
        where = "Fails, step 2, bucket"
        if rank == who:
            assert (kind, message) == ("Broken", f"on purpose in phase {phase}")
            assert where in notes[0]
        else:
            assert kind == "PeerFailed"
            assert f"rank {who} raised Broken: on purpose in phase {phase}" in message
            assert where in message


@pytest.mark.parametrize(
    "places",
    [
        # one rank raises in its hook, another on its thread, in an earlier bucket and in a later one
        [(0, 2, 2, 0), (1, 2, 0, 1)],
        [(0, 2, 0, 1), (1, 2, 2, 0)],
        [(0, 2, 1, 2), (1, 2, 1, 1), (2, 2, 1, 0)],
        # one step after the other
        [(0, 2, 0, 0), (1, 3, -1, 2), (2, 4, 1, 1)],
    ],
    ids=str,
)
def test_several_ranks_raise(places):
    steps = sorted({step for _, step, _, _ in places})
    for caught, equal, slowest in run_ranks(fail_at, 3, places):
        assert equal
        assert slowest < 5
        assert [step for step, *_ in caught] == steps
        assert {kind for _, kind, _, _ in caught} <= {"Broken", "PeerFailed"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_errors_at_random_places(seed):
    chance = random.Random(seed)
    print("seed", seed)
    for _ in range(40):
        world = chance.choice([2, 3, 4])
        places = [
            (
                chance.randrange(world),
                chance.randrange(2, 8),
                chance.choice([0, 1, 2, -1]),
                chance.randrange(3),
            )
            for _ in range(chance.randint(1, 4))
        ]
        outcomes = run_ranks(fail_at, world, places)
        failed = [[step for step, *_ in caught] for caught, _, _ in outcomes]
        assert failed == [sorted({step for _, step, _, _ in places})] * world, places
        assert all(equal and slowest < 10 for _, equal, slowest in outcomes), places


class OneLateOneBroken(gl.Strategy):
    """In step 1 rank 0 fails at its first answer, with its second request under way; rank 2 is late there."""

    async def reduce(self, bucket):
        here = (bucket.rank, bucket.step, bucket.index)
        if here == (2, 1, 1):
            time.sleep(LATE)
        mean = await gl.all_reduce(bucket.flat)
        if here == (0, 1, 0):  # on the lane's thread; the hook issues its next request meanwhile
            time.sleep(0.3)
            raise Broken("on purpose")
        return gl.Reduced(mean)


LATE = 4.0


def one_late_one_broken(rank):
    ddp = DistributedDataParallel(build(), **SMALL)
    with gl.attach(ddp, OneLateOneBroken(), timeout=20):
        ddp(data(rank, 0)).backward()
        start = time.monotonic()
        with pytest.raises((Broken, gl.PeerFailed), match="on purpose"):
            ddp(data(rank, 1)).backward()
        seconds = time.monotonic() - start
        ddp(data(rank, 2)).backward()
    return seconds


def test_an_error_does_not_wait_for_a_late_rank():
    broken, *_ = run_ranks(one_late_one_broken, 3)
    assert broken < LATE / 2


def fail_everywhere(rank):
    """All ranks raise the same: each sees its own error, not its neighbour's."""
    ddp = DistributedDataParallel(build())
    refusal = pytest.raises(gl.InvalidValue, match="weights of all 3 ranks add up to 0")
    with gl.attach(ddp, gl.WeightedMean(lambda: 0.0), timeout=20), refusal:
        ddp(data(rank, 0)).backward()
    return True


def test_all_zero_weights_are_refused_on_all_ranks():
    assert run_ranks(fail_everywhere, 3) == [True] * 3


def fail_at_first_step(rank, static_graph):
    """The first backward of a static graph runs its hooks inside autograd's final callbacks."""
    ddp = DistributedDataParallel(build(), static_graph=static_graph, **SMALL)
    caught = 0
    with gl.attach(ddp, Fails([(0, 0, 0, 1)]), timeout=20):
        for step in range(4):
            ddp.zero_grad()
            try:
                ddp(data(rank, step)).backward()
            except (Broken, gl.PeerFailed):
                caught += 1
    grads = flat([p.grad for p in ddp.parameters() if p.requires_grad])
    return caught, grads


@pytest.mark.parametrize("static_graph", [False, True])
def test_an_error_in_the_first_step(static_graph):
    (first, a), (second, b) = run_ranks(fail_at_first_step, 2, static_graph)
    assert first == second == 1
    assert torch.equal(a, b)


def back_to_the_failed_step(rank):
    """A step that failed is run again after loading the state before it: it must be reduced this time."""
    ddp = DistributedDataParallel(build(), **SMALL)
    with gl.attach(ddp, Fails([(1, 2, 0, 1)]), timeout=20) as attachment:
        for step in range(2):
            ddp(data(rank, step)).backward()
        state = attachment.state_dict()
        with pytest.raises((Broken, gl.PeerFailed)):
            ddp(data(rank, 2)).backward()
        attachment.load_state_dict(state)
        assert attachment.step == 2
        attachment.strategy.places = []
        ddp.zero_grad()
        ddp(data(rank, 2)).backward()
    return replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])


def test_a_failed_step_can_be_run_again():
    assert run_ranks(back_to_the_failed_step, 2) == [True, True]


class Checkpointed(torch.nn.Module):
    """Reentrant checkpoints run parts of backward in backwards of their own."""

    def __init__(self, reentrant):
        super().__init__()
        self.body = build(depth=3)
        self.first = torch.nn.Linear(24, 24)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for layer in self.body.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.body(x)


def fail_in_a_checkpoint(rank, reentrant):
    ddp = DistributedDataParallel(build(Checkpointed, reentrant=reentrant), static_graph=True, **SMALL)
    caught = []
    with gl.attach(ddp, Fails([(0, 2, 1, 1)]), timeout=20):
        for step in range(5):
            ddp.zero_grad()
            try:
                ddp(data(rank, step)).backward()
            except (Broken, gl.PeerFailed):
                caught.append(step)
    return caught, replicas_equal([p.grad for p in ddp.parameters() if p.requires_grad])


def test_activation_checkpoints():
    assert run_ranks(fail_in_a_checkpoint, 2, False) == [([2], True)] * 2
    assert run_ranks(fail_in_a_checkpoint, 2, True) == [([2], True)] * 2


def lose_a_peer(rank, how, timeout):
    ddp = DistributedDataParallel(build(), **SMALL)
    attachment = gl.attach(ddp, "Mean()", timeout=timeout)
    for step in range(3):
        ddp(data(rank, step)).backward()
    if rank == 1:
        os.kill(os.getpid(), how)
        time.sleep(3 * timeout)
    start = time.monotonic()
    try:
        ddp(data(rank, 3)).backward()
    except gl.PeerLost as error:
        seconds = time.monotonic() - start
        attachment.close()
        # The default group is broken too; leave without the barrier of a clean end.
        torch.distributed.destroy_process_group()
        return seconds, str(error), error.rank
    return None


def survivors(how, timeout):
    """Rank 1 of three is lost; what ranks 0 and 2 saw."""
    stories = {}

    def note(value):
        stories[value[0]] = value[1]

    with pytest.raises(RankFailed, match="1 of 3 ranks failed"):
        run_ranks(_telling, 3, how, timeout, deadline=8, on_report=note)
    return stories


def _telling(rank, how, timeout):
    from gradlane.local import tell

    story = lose_a_peer(rank, how, timeout)
    tell((rank, story))


@pytest.mark.slow  # tests/faults has a quick one
def test_a_killed_peer_is_named_at_once():
    stories = survivors(signal.SIGKILL, 20.0)
    assert set(stories) == {0, 2}
    for seconds, message, lost in stories.values():
        assert seconds < 5
        assert lost == 1
        assert "rank 1 is gone or did not answer" in message


@pytest.mark.slow  # tests/faults has a quick one
def test_a_stalled_peer_is_named_within_the_time_out():
    stories = survivors(signal.SIGSTOP, 3.0)
    assert set(stories) == {0, 2}
    for seconds, message, lost in stories.values():
        assert 2 < seconds < 3 + 2.5
        assert lost == 1
        assert "raise timeout=" in message


def one_step_too_many(rank):
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, "Mean()", timeout=2):
        for step in range(3 + rank):
            try:
                ddp(data(rank, step)).backward()
            except gl.PeerLost as error:
                assert rank == 1
                return step, str(error)
        time.sleep(4 if rank == 0 else 0)
    return 3, ""


def test_a_rank_that_takes_more_steps_is_told():
    (_, _), (step, message) = run_ranks(one_step_too_many, 2)
    assert step == 3
    assert "rank 0 is gone or did not answer within 2 s" in message
