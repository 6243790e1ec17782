"""R1 and R4: one of four ranks is killed, or stopped, anywhere. The others say so in time, and end well."""

import signal
import time
from functools import partial
from itertools import cycle, islice

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.lane.peers import GRACE, Peers
from gradlane.local import run_ranks, tell

from ..support.catalogue import STRATEGIES
from ..support.training import build, data, replicas_equal
from . import kills as training
from .faulty import Faulty, Point, fire
from .harness import connect, drawing, leave_the_lost, run, side_by_side, state_of
from .kills import SAVED, WORLD, Blow, begin, kill_one, killed, opened, stop_one, strategy_of, told

NAMES = ("mean", "int4 feedback", "powersgd", "local steps int4")


def test_killed_at_four_points():
    chance = drawing("kill one, powersgd")
    told("powersgd", [kill_one("powersgd", Blow.drawn(chance)) for _ in range(4)])


def test_killed_in_a_round_of_local_steps():
    name = "local steps int4"
    point = Point(1, 2, -1, "answered")
    told(name, [kill_one(name, blow) for blow in (Blow(1, 2, point, 0.0), Blow(0, 5, None, 0.01))])


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

    def lately(rank, step):
        if (rank, step) == (late, 3):
            time.sleep(0.3)
        return data(rank, step)

    monkeypatch.setattr(training, "data", lately)
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


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
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


def load_each(rank, name, blows, folders):
    """How many of them load, each into a strategy that has seen nothing."""
    loaded = 0
    for blow, folder in zip(blows, folders, strict=True):
        ddp = DistributedDataParallel(build(), bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
        attachment = opened(ddp, optimizer, strategy_of(name, blow, "kill"), timeout=20)
        attachment.load(folder)
        loaded += getattr(attachment, "local_steps", attachment.step) == SAVED
        attachment.close()
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_fifty_points(name, tmp_path):
    chance = drawing(f"kill one of four, {name}")
    blows = [Blow.drawn(chance) for _ in range(50)]
    folders = [str(tmp_path / str(number)) for number in range(50)]
    starts = [
        partial(begin, name, blow, signal.SIGKILL, 20, folder)
        for blow, folder in zip(blows, folders, strict=True)
    ]
    told(name, list(map(killed, side_by_side(starts, most=3), blows)))
    assert run_ranks(load_each, WORLD, name, blows, folders, deadline=120) == [50] * WORLD
    print(f"{name}: the last checkpoint loads, 50 of 50")


@pytest.mark.slow
def test_stopped_at_ten_points():
    chance = drawing("stop one of four")
    told("in turns", [stop_one(name, Blow.drawn(chance)) for name in islice(cycle(NAMES), 10)])


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
