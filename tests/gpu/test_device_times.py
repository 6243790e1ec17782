"""What requests take on a device, by events that the host reads when it waits anyway."""

import json
from itertools import pairwise

import pytest
import torch

import gradlane as gl
from gradlane.lane import stream_commit
from gradlane.telemetry.trace import chrome_trace, read_lines

from .ranks import needs_compiler, run, train, without
from .test_failures import Breaks

pytestmark = needs_compiler

NS = 1e-9  # what a byte takes on the emulated device
SUMS = {"device_encode_seconds": "encode", "device_seconds": "collective", "device_decode_seconds": "decode"}


class Times(gl.Sink):
    def __init__(self):
        self.steps, self.order = [], []

    def device_timed(self, times):
        self.steps.append(times)
        self.order.append(("device", times.step))

    def step_ended(self, times):
        self.order.append(("step", times.step))


@gl.strategy_from
async def known_work(bucket):
    """Two requests; one kernel before the first, three between them, and two after the second."""
    flat = bucket.flat.mul_(1.0)
    (half,) = (await gl.all_reduce(flat),)
    for _ in range(3):
        half.mul_(1.0)
    total = await gl.all_reduce(half)
    return total.mul_(1.0).mul_(1.0)


def timed(rank, strategy, steps, observer, options):
    created, usual = [], torch.Event

    def counted(*args, enable_timing=False):
        created.append(enable_timing)
        return usual(*args, enable_timing=enable_timing)

    torch.Event = counted
    try:
        times = Times() if observer else None
        given = {} if times is None else {"observer": times}
        found = train(rank, strategy, steps=steps, cap=0.01, options={**given, **options})
    finally:
        torch.Event = usual
    return found, times and times.steps, times and times.order, sum(created)


def test_parts_follow_one_another_and_take_what_their_kernels_take():
    for found, steps, order, _ in run(timed, 2, known_work, 3, True, {}):
        assert (found.races, found.errors) == ([], [])
        assert order == [(what, step) for step in range(3) for what in ("device", "step")]
        for times in steps:
            assert times.step == 0 or len({request.bucket for request in times.requests}) > 2
            assert [request.phase for request in times.requests[:2]] == [0, 1]
            passed = 0.0
            for first, second in zip(times.requests[::2], times.requests[1::2], strict=True):
                assert first.encode > 0
                assert second.encode == pytest.approx(3 * first.encode)
                assert (first.decode, second.decode) == pytest.approx((0.0, 2 * first.encode))
                assert first.collective == pytest.approx(second.collective)
                assert first.began >= passed - NS
                assert second.began == pytest.approx(first.began + first.encode + first.collective)
                passed = second.began + second.encode + second.collective + second.decode
            assert times.ended >= max(passed, times.computed) - NS
            assert times.exposed == pytest.approx(times.ended - times.computed)
        for name, part in SUMS.items():
            expected = sum(getattr(request, part) for times in steps for request in times.requests)
            assert found.metrics[f"comm/{name}"] == pytest.approx(expected)
            last = sum(getattr(request, part) for request in steps[-1].requests)
            assert found.metrics[f"comm/step/{name}"] == pytest.approx(last)


def test_encode_reads_and_writes_the_buckets_once():
    (_, steps, _, _), _ = run(timed, 2, known_work, 2, True, {"nonfinite": "propagate"})
    elements = 3 * 64 * 65 + 65 * 3
    assert sum(r.encode for r in steps[-1].requests if r.phase == 0) == pytest.approx(2 * 4 * elements * NS)


def test_the_host_waits_no_more_and_events_are_used_again():
    counts = set()
    for steps in (3, 7):
        for found, _, _, created in run(timed, 2, "ErrorFeedback(Sharded(Int8()))", steps, True, {}):
            assert (found.waits, found.all_waits) == ({}, 1)
            counts.add(created)
    assert len(counts) == 1
    assert counts.pop() > 10


def test_there_are_no_events_where_nobody_observes():
    for found, _, _, created in run(timed, 2, "Mean()", 2, False, {}):
        assert created == 0
        assert not any("device" in name for name in found.metrics)


def too_late(rank):
    """The end of a step is marked behind what the host waits for."""
    stream_commit.StreamCommit.send = without(
        stream_commit.StreamCommit.send, "self.pending = True", "self.pending = True; at_end()"
    )
    return timed(rank, "Mean()", 3, True, {})


def test_a_mark_that_the_host_has_not_waited_for_is_refused():
    for found, _, _, _ in run(too_late, 2):
        assert "events must be completed" in found.errors[0][2]


def test_a_failed_step_has_no_times():
    for found, steps, _, _ in run(timed, 2, Breaks(False, 1), 3, True, {}):
        assert [error[0] for error in found.errors] == [1]
        assert [times.step for times in steps] == [0, 2]


def recorded(rank, folder):
    observer = gl.JsonLines(f"{folder}/{{rank}}.jsonl")
    return train(rank, known_work, steps=2, cap=0.01, options={"observer": observer}).races


def test_json_lines_and_the_trace_have_them(tmp_path):
    assert run(recorded, 2, str(tmp_path)) == [[], []]
    runs = [read_lines(tmp_path / f"{rank}.jsonl") for rank in range(2)]
    for lines in runs:
        requests = [(x["step"], x["bucket"], x["phase"]) for x in lines if x["type"] == "request"]
        assert [(x["step"], x["bucket"], x["phase"]) for x in lines if x["type"] == "device"] == requests
        assert [x["step"] for x in lines if x["type"] == "device_step"] == [0, 1]
    trace = chrome_trace(runs)["traceEvents"]
    (track,) = {x["tid"] for x in trace if x["name"] == "thread_name" and "device" in x["args"]["name"]}
    spans = [x for x in trace if x["ph"] == "X" and x["tid"] == track and x["pid"] == 1]
    assert {x["name"] for x in spans} == {"encode", "all_reduce", "decode"}
    assert all(one["ts"] + one["dur"] <= two["ts"] + 1.0 for one, two in pairwise(spans))
    json.dumps(trace)
