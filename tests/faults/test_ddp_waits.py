"""DDP has collectives of its own: in its second forward, in each one with buffers, in ``join``. Who is late
to them is named, ``timeout=`` ends them, and a rank that dies in them is a lost peer."""

import signal
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.training import build, data, replicas_equal
from .faulty import fire
from .harness import Warnings, connect, leave_the_lost, run

WAITS = {
    "rebuild": (1, {}, "in DDP's rebuild of its buckets"),
    "static graph": (2, {"static_graph": True}, "in DDP's rebuild of its buckets"),
    "buffers": (3, {}, "in DDP's broadcast of buffers"),
    "first buffers": (0, {}, "in DDP's broadcast of buffers"),
}
"""By name: the step whose forward waits, options of DDP, and what it is called."""


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = build()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch):
        self.seen += 1
        return self.inner(batch)


def model_of(wait):
    _, options, _ = WAITS[wait]
    return DistributedDataParallel(WithBuffers() if "buffers" in wait else build(), **options)


def one_comes_late(rank, wait, timeout, pause):
    warnings = Warnings()
    late_in, _, _ = WAITS[wait]
    ddp = model_of(wait)
    with gl.attach(ddp, "Sharded(Raw())", timeout=timeout):
        for step in range(late_in + 2):
            if rank == 0 and step == late_in:
                time.sleep(pause)
            ddp(data(rank, step)).backward()
        equal = replicas_equal(p.grad for p in ddp.parameters() if p.requires_grad)
    return equal, [line for _, line in warnings.lines]


QUICK = ("rebuild", "buffers")


@pytest.mark.parametrize(
    "wait", [pytest.param(w, marks=() if w in QUICK else pytest.mark.slow) for w in WAITS]
)
def test_who_is_late_to_a_forward_is_named(wait):
    """Rank 0, from which buffers come. No rank used to say anything, for the 30 minutes of the group."""
    outcomes = run_ranks(one_comes_late, 3, wait, 4.0, 2.2)
    assert [equal for equal, _ in outcomes] == [True] * 3
    assert outcomes[0][1] == []
    for _, lines in outcomes[1:]:
        (line,) = lines
        assert line.startswith(f"rank 0 has not entered the forward of step {WAITS[wait][0]} (waited 1")


@pytest.mark.slow
def test_nobody_is_named_who_is_not_late():
    assert run_ranks(one_comes_late, 3, "buffers", 6.0, 0.5) == [(True, [])] * 3


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = WithBuffers()

    def forward(self, batch):
        time.sleep(1.5)
        return self.inner(batch)


def slow_forward(rank):
    warnings = Warnings()
    ddp = DistributedDataParallel(Slow())
    with gl.attach(ddp, "Mean()", timeout=4):
        for step in range(2):
            ddp(data(rank, step)).backward()
    return [line for _, line in warnings.lines]


def test_a_forward_that_computes_for_long_is_not_late():
    assert run_ranks(slow_forward, 2) == [[], []]


def lose_one(rank, path, world, wait, how, victim, timeout):
    """In the forward: what the others raise, and after how long."""
    warnings = Warnings()
    connect(rank, path, world, timeout=60)
    story = _lose_one(rank, wait, how, victim, timeout)
    leave_the_lost()
    return story, [line for _, line in warnings.lines]


def _lose_one(rank, wait, how, victim, timeout):
    lost_in, _, _ = WAITS[wait]
    ddp = model_of(wait)
    attachment = gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))", timeout=timeout)
    try:
        for step in range(lost_in + 3):
            began = time.monotonic()
            if (rank, step) == (victim, lost_in):
                time.sleep(0.5)
                fire(how, 0.0, wait)
            ddp(data(rank, step)).backward()
    except gl.PeerLost as error:
        return str(error), error.rank, step, time.monotonic() - began
    finally:
        attachment.close()
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize(
    ("wait", "victim"),
    [
        ("rebuild", 2),
        ("buffers", 0),
        pytest.param("rebuild", 0, marks=pytest.mark.slow),
        pytest.param("buffers", 2, marks=pytest.mark.slow),
    ],
)
def test_who_dies_before_a_forward_is_lost(wait, victim):
    story = run(lose_one, 3, 3, wait, "kill", victim, 20.0, deadline=40, victim=victim)
    assert story.codes[victim] == -signal.SIGKILL
    assert set(story.results) == {0, 1, 2} - {victim}, story.failures
    for (message, lost, _, seconds), _ in story.results.values():
        assert lost == victim, message
        assert seconds < 0.5 + 5
    told = [message for (message, *_), _ in story.results.values()]
    assert any(f"the forward of step {WAITS[wait][0]}, {WAITS[wait][2]}:" in message for message in told), (
        told
    )


@pytest.mark.parametrize(
    ("wait", "victim"), [("rebuild", 2), ("buffers", 0), pytest.param("rebuild", 0, marks=pytest.mark.slow)]
)
def test_a_timeout_ends_ddps_own_waits(wait, victim):
    """That of the group is 60 s here."""
    story = run(lose_one, 3, 3, wait, "stop", victim, 2.5, deadline=40, victim=victim)
    assert story.victim_state == "T"
    assert set(story.results) == {0, 1, 2} - {victim}, story.failures
    for (message, lost, _, seconds), lines in story.results.values():
        assert lost == victim, message
        assert 2 < seconds < 8
        assert "within 2.5 s" in message or "the store" in message
        if victim != 0:  # which holds the store
            assert any(f"rank {victim} has not entered the forward" in line for line in lines), lines


def lose_one_in_backward(rank, path, how, victim, timeout):
    connect(rank, path, 3, timeout=60)
    story = _lose_one_in_backward(rank, how, victim, timeout)
    leave_the_lost()
    return story


def _lose_one_in_backward(rank, how, victim, timeout):
    ddp = DistributedDataParallel(build(sometimes=True), find_unused_parameters=True)
    attachment = gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))", timeout=timeout)
    for step in range(3):
        loss = ddp(data(rank, step))
        if (rank, step) == (victim, 2):
            time.sleep(0.5)
            fire(how, 0.0, "backward")
        began = time.monotonic()
        try:
            loss.backward()
        except gl.PeerLost as error:
            attachment.close()
            return error.rank, step, time.monotonic() - began
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize(
    ("how", "victim"), [("kill", 2), ("stop", 1), pytest.param("kill", 0, marks=pytest.mark.slow)]
)
def test_who_is_lost_in_backward_is_not_waited_for_by_ddp(how, victim):
    """With ``find_unused_parameters`` DDP has a collective at the very end, whatever the lane has found out:
    torch's error hid ours, and a stall lasted for the timeout of the group."""
    story = run(lose_one_in_backward, 3, how, victim, 3.0, deadline=40, victim=victim)
    assert set(story.results) == {0, 1, 2} - {victim}, story.failures
    for lost, step, seconds in story.results.values():
        assert (lost, step) == (victim, 2)
        assert seconds < 9


def late_in_join(rank):
    """Rank 2 has no more data, rank 1 comes late to the last step; what the others say."""
    warnings = Warnings()
    ddp = DistributedDataParallel(WithBuffers())
    with gl.attach(ddp, "Mean()", timeout=4), ddp.join():
        for step in range((4, 4, 2)[rank]):
            if rank == 1 and step == 3:
                time.sleep(2.2)
            ddp(data(rank, step)).backward()
    return replicas_equal(ddp.parameters()), [line for _, line in warnings.lines]


def test_who_is_late_to_a_join_is_named():
    (_, first), (_, late), (_, joined) = outcomes = run_ranks(late_in_join, 3)
    assert [equal for equal, _ in outcomes] == [True] * 3
    assert late == []
    for lines in (first, joined):
        assert any("rank 1 has not entered the forward of step 3" in line for line in lines), lines


def own_error(rank):
    """Something of DDP's that is wrong on this rank, and no fault of a peer."""
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, "Mean()", timeout=20):
        ddp(data(rank, 0))
        for parameter in ddp.parameters():
            parameter.grad = None
        half = [p for p in ddp.parameters() if p.requires_grad][-1]
        half.sum().backward()  # one of its gradients, and then another forward
        with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
            ddp(data(rank, 1))
    return type(caught.value).__name__, "_pre_forward" in vars(ddp)


def test_errors_that_are_not_the_networks_stay_as_they_are_and_close_undoes_it():
    assert run_ranks(own_error, 2) == [("RuntimeError", False)] * 2


def compiled(rank):
    """Torch compiles the same graphs, with an attachment and without."""
    counts = []
    for attached in (False, True):
        torch._dynamo.reset()
        graphs = []

        def keep(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        ddp = DistributedDataParallel(WithBuffers())
        attachment = gl.attach(ddp, "Mean()", timeout=60) if attached else None
        fast = torch.compile(ddp, backend=keep)
        for step in range(3):
            fast(data(rank, step)).backward()
        counts.append((len(graphs), replicas_equal(p.grad for p in ddp.parameters() if p.requires_grad)))
        if attachment is not None:
            attachment.close()
    return counts


@pytest.mark.slow
def test_what_is_watched_is_compiled_all_the_same():
    for plain, watched in run_ranks(compiled, 2, deadline=200):
        assert plain == watched
        assert plain[0] > 0
        assert plain[1]
