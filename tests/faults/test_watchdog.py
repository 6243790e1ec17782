"""While ranks wait, they say who is late; and signals are served."""

import os
import signal
import threading
import time

from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.training import build, data, replicas_equal
from .faulty import Faulty, Point
from .harness import Warnings

SMALL = {"bucket_cap_mb": 0.004}


def one_comes_late(rank, timeout, pause):
    """Rank 1 comes late to step 2: the others' lines."""
    warnings = Warnings()
    ddp = DistributedDataParallel(build(), **SMALL)
    with gl.attach(ddp, "Sharded(Raw())", timeout=timeout):
        for step in range(4):
            if rank == 1 and step == 2:
                time.sleep(pause)
            ddp(data(rank, step)).backward()
    return [line for _, line in warnings.lines]


def test_a_rank_that_has_not_come_is_named_once():
    first, late, last = run_ranks(one_comes_late, 3, 6.0, 3.5)
    assert late == []
    for lines in (first, last):
        (line,) = lines
        assert line.startswith("rank 1 has not entered bucket 0 of step 2 (waited 1.")


def test_nobody_is_named_when_nobody_is_late():
    assert run_ranks(one_comes_late, 3, 6.0, 0.5) == [[], [], []]


def one_comes_late_to_the_roll_call(rank):
    warnings = Warnings()
    model = build()
    with gl.attach_without_ddp(model, "Sharded(Raw())", timeout=6) as own_loop:
        for step in range(4):
            model(data(rank, step)).backward()
            if rank == 1 and step == 2:
                time.sleep(3.5)
            own_loop.reduce()
    return [line for _, line in warnings.lines]


def test_a_roll_call_is_a_place_of_its_own():
    first, late = run_ranks(one_comes_late_to_the_roll_call, 2)
    assert late == []
    (line,) = first
    assert line.startswith("rank 1 has not entered the roll call of step 2 (waited 1.")


def one_stays_in_its_decoder(rank):
    warnings = Warnings()
    ddp = DistributedDataParallel(build(), **SMALL)
    late = Faulty(gl.Sharded(gl.Raw()), Point(2, 2, 1, "answered"), "sleep", 3.5)
    with gl.attach(ddp, late, timeout=6):
        for step in range(4):
            ddp(data(rank, step)).backward()
    return [line for _, line in warnings.lines], replicas_equal(
        p.grad for p in ddp.parameters() if p.requires_grad
    )


def test_a_rank_that_is_elsewhere_is_named_with_its_place():
    outcomes = run_ranks(one_stays_in_its_decoder, 3)
    assert all(equal for _, equal in outcomes)
    for lines, _ in outcomes[:2]:
        (line,) = lines
        assert "rank 2 is in bucket 1 of step 2, at work after phase 0: all_to_all(" in line


def slow_but_moving(rank):
    """Every bucket takes a while, none of them too long: nobody is late. And how long the step took."""
    warnings = Warnings()

    async def slow(bucket):
        mean = await gl.all_reduce(bucket.flat)
        time.sleep(0.5)
        return mean

    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.002)
    with gl.attach(ddp, gl.strategy_from(slow), timeout=6):
        ddp(data(rank, 0)).backward()
        start = time.monotonic()
        ddp(data(rank, 1)).backward()  # in DDP's final buckets
    return [line for _, line in warnings.lines], time.monotonic() - start


def test_slow_is_not_late():
    for lines, seconds in run_ranks(slow_but_moving, 2):
        assert seconds > 1.5 * 6 / 4
        assert lines == []


def serve_a_signal(rank):
    """SIGTERM comes while rank 0 waits for rank 1: when its handler ran, after it was sent."""
    times = {}

    def handle(number, frame):
        times["served"] = time.monotonic()

    def send():
        times["sent"] = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
    ddp = DistributedDataParallel(build(), **SMALL)
    with gl.attach(ddp, "Mean()", timeout=20):
        for step in range(2):  # the second forward of DDP has a collective of its own
            ddp(data(rank, step)).backward()
        if rank == 1:
            time.sleep(4)
            ddp(data(rank, 2)).backward()
            return None
        timer = threading.Timer(1, send)
        timer.start()
        ddp(data(rank, 2)).backward()
        ended = time.monotonic()
        timer.join()
    return times["served"] - times["sent"], ended - times["served"]


def test_signals_are_served_while_a_collective_waits():
    (delay, waited_on), _ = run_ranks(serve_a_signal, 2)
    assert delay < 2
    assert waited_on > 1  # it was served during the stall, not after it


def quiet_steps(rank):
    """Steps where nothing is late write nothing to the store, and start no thread."""
    ddp = DistributedDataParallel(build(), **SMALL)
    started = []
    threads = threading.Thread.start

    def start(thread):
        started.append(thread.name)
        threads(thread)

    with gl.attach(ddp, "Mean()", timeout=40):
        ddp(data(rank, 0)).backward()
        threading.Thread.start = start
        for step in range(1, 20):
            ddp(data(rank, step)).backward()
        threading.Thread.start = threads
    return started


def test_what_is_not_late_costs_nothing():
    assert run_ranks(quiet_steps, 2) == [[], []]
