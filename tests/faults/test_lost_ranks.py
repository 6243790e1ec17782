"""R1 and R4: one of four ranks is killed, or stopped, anywhere. The others say so in time, and end well."""

import random
import re
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.lane.peers import GRACE, Peers
from gradlane.local import tell

from ..catalogue import STRATEGIES
from ..training import build, data, replicas_equal
from .faulty import MOMENTS, Faulty, Point, fire
from .harness import Warnings, connect, drawing, leave_the_lost, run, state_of

WORLD = 4
STEPS = 60  # more than any fault lets happen


@dataclass(frozen=True)
class Blow:
    """What befalls whom: at a point of its strategy, or so many seconds after a step has begun."""

    rank: int
    step: int
    point: Point | None
    delay: float

    @classmethod
    def drawn(cls, chance: random.Random) -> "Blow":
        # Not in DDP's own collectives, in its constructor and its second forward: they are not ours.
        point = Point.drawn(chance, WORLD, moments=MOMENTS, steps=(2, 6))
        by_clock = chance.random() < 0.5
        return cls(point.rank, point.step, None if by_clock else point, chance.uniform(0, 0.05))


def train_until_lost(rank, path, name, blow, what, timeout):
    warnings = Warnings()
    connect(rank, path, WORLD)
    story = _train(rank, name, blow, what, timeout)
    leave_the_lost()
    return *story, [line for _, line in warnings.lines]


def _train(rank, name, blow, what, timeout):
    """When which error came, whom it names, and in which step."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    strategy = STRATEGIES[name]()
    if blow.point is not None:
        strategy = Faulty(strategy, blow.point, what)
    attachment = gl.attach(ddp, strategy, timeout=timeout)
    try:
        for step in range(STEPS):
            if rank == blow.rank and step == blow.step:
                tell(("begun", step))
            optimizer.zero_grad()
            ddp(data(rank, step)).backward()
            optimizer.step()
    except gl.PeerLost as error:
        return time.monotonic(), str(error), error.rank, step
    finally:
        attachment.close()
    raise AssertionError(f"rank {rank} has trained through {STEPS} steps")


def strike(name, blow, what, timeout, deadline):
    """What the survivors have to say; all of them must, and end with exit code 0."""
    print(name, blow)

    def on_report(running, report):
        if report[0] == "begun" and blow.point is None:
            time.sleep(blow.delay)
            running.signal(blow.rank, what)

    how = "kill" if what == signal.SIGKILL else "stop"
    story = run(
        train_until_lost, WORLD, name, blow, how, timeout, deadline=deadline, victim=blow.rank,
        on_report=on_report,
    )  # fmt: skip
    assert set(story.results) == set(range(WORLD)) - {blow.rank}, story.failures
    for rank in story.results:
        assert story.codes[rank] == 0, f"rank {rank} ended with {story.codes[rank]}"
    return story


def kill_one(name, blow):
    story = strike(name, blow, signal.SIGKILL, timeout=20, deadline=40)
    assert story.codes[blow.rank] == -signal.SIGKILL
    for when, message, lost, step, _ in story.results.values():
        assert when - story.fired < 5
        assert lost == blow.rank, message
        assert f"rank {blow.rank}" in message
        assert step >= blow.step
    return max(when - story.fired for when, *_ in story.results.values())


def stop_one(name, blow):
    story = strike(name, blow, signal.SIGSTOP, timeout=5, deadline=40)
    assert story.victim_state == "T"
    for when, message, lost, _, lines in story.results.values():
        assert 4 < when - story.fired < 7
        assert lost == blow.rank, message
        assert f"rank {blow.rank}" in message
        if blow.rank != 0:  # which hosts the store, through which the others would learn who is late
            assert blow.rank in accused(lines), lines
    return max(when - story.fired for when, *_ in story.results.values())


def accused(lines):
    """Whom the watchdog took to be missing or silent."""
    named = [
        found
        for line in lines
        for found in re.findall(r"ranks? ([\d, ]+) ha(?:s|ve) not entered|rank (\d+) was in", line)
    ]
    return {int(rank) for found in named for rank in re.findall(r"\d+", " ".join(found))}


def told(what, seconds):
    print(f"{what}: {len(seconds)} blows, the last survivor raised after {max(seconds):.2f} s at most")


@pytest.mark.parametrize("name", [pytest.param("mean", marks=pytest.mark.slow), "powersgd"])
def test_killed_at_four_points(name):
    chance = drawing(f"kill one, {name}")
    told(name, [kill_one(name, Blow.drawn(chance)) for _ in range(4)])


def test_rank_0_ends_no_sooner_than_a_slow_survivor_has_read(monkeypatch):
    """It holds the store. Without it nobody can say who is lost; and a rank that reported was not."""
    at_once = Peers.diagnose

    def slowly(peers, *given):
        if peers.rank == 3:
            time.sleep(1.0)
        return at_once(peers, *given)

    monkeypatch.setattr(Peers, "diagnose", slowly)
    kill_one("int4 feedback", Blow(rank=2, step=3, point=None, delay=0.0))


@pytest.mark.parametrize("late", [1, 2])
def test_who_finds_a_rank_dead_at_its_first_request_tells_those_who_wait_for_it(late, monkeypatch):
    """The others are in their bucket already, and wait for the late one before they would look at the dead:
    they hear of it only when the late one closes its connections."""

    at_once = data

    def lately(rank, step):
        if (rank, step) == (late, 3):
            time.sleep(0.3)
        return at_once(rank, step)

    monkeypatch.setitem(globals(), "data", lately)
    seconds = kill_one("int4 feedback", Blow(3, 3, Point(3, 3, 0, "before encoding"), 0.0))
    assert seconds < 0.3 + GRACE + 1  # it used to be as long as the late one listened, and then as long again


def test_survivors_that_are_slow_to_report_are_not_taken_for_lost(monkeypatch):
    at_once = Peers.report

    def slowly(peers, *given, **more):
        if peers.rank in (0, 1):
            time.sleep(1.8)
        return at_once(peers, *given, **more)

    monkeypatch.setattr(Peers, "report", slowly)
    kill_one("int4 feedback", Blow(rank=3, step=3, point=None, delay=0.0))


def test_rank_0_and_its_store_are_killed():
    chance = drawing("kill rank 0")
    kill_one("int4 feedback", Blow(0, 3, None, chance.uniform(0, 0.05)))


@pytest.mark.parametrize("victim", [0, 2])
def test_stopped(victim):
    chance = drawing(f"stop rank {victim}")
    drawn = Blow.drawn(chance)
    stop_one("int4 feedback", Blow(victim, drawn.step, None, drawn.delay))


def train_to_the_end(rank, path, name, victim):
    connect(rank, path, WORLD)
    equal = _train_to_the_end(rank, name, victim)
    gl.shutdown()
    return equal


def _train_to_the_end(rank, name, victim):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    with gl.attach(ddp, STRATEGIES[name](), timeout=20):
        for step in range(12):
            if rank == victim and step == 4:
                tell(("begun", step))
            optimizer.zero_grad()
            ddp(data(rank, step)).backward()
            optimizer.step()
    return replicas_equal(ddp.parameters())


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_stopped_for_a_while_is_not_lost(victim):
    chance = drawing(f"stop rank {victim} for a while")
    states = []

    def on_report(running, report):
        if report[0] == "begun":
            time.sleep(chance.uniform(0, 0.03))
            running.signal(victim, signal.SIGSTOP)
            time.sleep(1.5)
            states.append(state_of(running.pids[victim]))
            running.signal(victim, signal.SIGCONT)

    story = run(train_to_the_end, WORLD, "int4 feedback", victim, deadline=40, on_report=on_report)
    assert states == ["T"]
    assert story.results == dict.fromkeys(range(WORLD), True), story.failures
    assert set(story.codes.values()) == {0}


def attach_without_one(rank, path, victim):
    connect(rank, path, WORLD)
    story = _attach_without(rank, victim)
    leave_the_lost()
    return story


def _attach_without(rank, victim):
    ddp = DistributedDataParallel(build())
    if rank == victim:
        fire("stop", 0.0, "attach")
    start = time.monotonic()
    with pytest.raises(gl.PeerLost, match=f"attach: .*rank {victim}") as caught:
        gl.attach(ddp, "Mean()", timeout=3)
    return time.monotonic() - start, caught.value.rank


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stopped_before_attach(victim):
    """Also the rank that hosts the store, of whom torch's store would wait for an answer for ever."""
    story = run(attach_without_one, WORLD, victim, deadline=30, victim=victim)
    assert story.victim_state == "T"
    assert set(story.results) == set(range(WORLD)) - {victim}, story.failures
    for seconds, lost in story.results.values():
        assert 2.5 < seconds < 5
        assert lost == victim


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "int4 feedback", "powersgd"])
def test_killed_at_fifty_points(name):
    chance = drawing(f"kill one of four, {name}")
    told(name, [kill_one(name, Blow.drawn(chance)) for _ in range(50)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "int4 feedback", "powersgd"])
def test_stopped_at_ten_points(name):
    chance = drawing(f"stop one of four, {name}")
    told(name, [stop_one(name, Blow.drawn(chance)) for _ in range(10)])


def fail_and_lose_rank_0(rank, path):
    connect(rank, path, WORLD)
    story = _fail_and_lose_rank_0(rank)
    leave_the_lost()
    return story


def _fail_and_lose_rank_0(rank):
    """Step 2 fails on all ranks; rank 0 goes, with the store, while the others wait for it to meet again."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    strategy = Faulty(gl.Mean(), Point(1, 2, 0, "before encoding"))
    attachment = gl.attach(ddp, strategy, timeout=20)
    kinds = []
    for step in range(4):
        if rank == 0 and step == 3:
            time.sleep(0.5)
            fire("kill", 0.0, "rank 0")
        try:
            ddp(data(rank, step)).backward()
        except Exception as error:  # noqa: BLE001  which one it is, is the question
            kinds.append((step, type(error).__name__, getattr(error, "rank", None)))
    attachment.close()
    return kinds


def test_rank_0_is_killed_while_the_others_form_new_connections():
    story = run(fail_and_lose_rank_0, WORLD, deadline=40, victim=0)
    assert story.codes[0] == -signal.SIGKILL
    assert story.results == {
        1: [(2, "Broken", None), (3, "PeerLost", 0)],
        2: [(2, "PeerFailed", 1), (3, "PeerLost", 0)],
        3: [(2, "PeerFailed", 1), (3, "PeerLost", 0)],
    }, story.failures
