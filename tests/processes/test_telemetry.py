"""What an attachment reports, on real processes."""

import itertools
import json
import logging
import os

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradlane as gl
from gradlane.kernels.native import kernels_in_use
from gradlane.local import run_ranks
from gradlane.telemetry.trace import chrome_trace, read_lines

from ..support.training import build, data
from .test_lane import TwoPhases

STEPS = 4


def steps_of(ddp, rank, count=STEPS):
    for step in range(count):
        ddp(data(rank, step)).backward()


def record(rank, folder):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.005)
    events = []
    attachment = gl.attach(
        ddp, TwoPhases(), observer=[gl.JsonLines(f"{folder}/comm-{{rank}}.jsonl"), events.append]
    )
    steps_of(ddp, rank, STEPS - 1)
    before = attachment.metrics()
    steps_of(ddp, rank, 1)
    attachment.close()
    return events, before, attachment.metrics()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    results = run_ranks(record, 2, str(folder))
    return results, [read_lines(folder / f"comm-{rank}.jsonl") for rank in range(2)], folder


def test_it_says_which_kernels_are_in_use(recorded):
    results, files, _ = recorded
    for (_, _, metrics), lines in zip(results, files, strict=True):
        assert lines[0]["kernels"] == kernels_in_use()
        assert metrics["comm/compiled_kernels"] == kernels_in_use().startswith("C, ")


def test_every_request_is_a_line_with_all_that_the_event_has(recorded):
    results, files, _ = recorded
    for (events, _, _), lines in zip(results, files, strict=True):
        requests = [line for line in lines if line["type"] == "request"]
        assert len(requests) == len(events) > 2 * STEPS
        names = {}
        for line in lines:
            if line["type"] == "bucket":
                names[line["bucket"]] = tuple(line["parameters"])
            elif line["type"] == "request":
                event = events[requests.index(line)]
                for field in ("step", "bucket", "phase", "kind", "op", "over", "payload_bytes", "wire_bytes"):
                    assert line[field] == getattr(event, field)
                assert names[line["bucket"]] == event.parameters
                for field in ("encode", "queued", "collective", "decode"):
                    assert line[f"{field}_s"] == pytest.approx(getattr(event.timing, field), abs=1e-6)


def test_the_seconds_of_a_request_follow_one_another_and_are_never_counted_twice(recorded):
    results, files, _ = recorded
    for (events, _, _), lines in zip(results, files, strict=True):
        ended = {line["step"]: line for line in lines if line["type"] == "step"}
        assert sorted(ended) == list(range(STEPS))
        for step in range(STEPS):
            mine = [event for event in events if event.step == step]
            for event in mine:
                timing = event.timing
                assert min(timing.encode, timing.queued, timing.collective, timing.decode) >= 0
                assert ended[step]["ready"] - 1e-6 <= timing.began <= ended[step]["ended"] + 1e-6
            # Only the last request of a bucket has a decode.
            lasts = {event.bucket: event.phase for event in mine}
            assert all(event.timing.decode == 0 for event in mine if event.phase < lasts[event.bucket])
            assert all(event.timing.decode > 0 for event in mine if event.phase == lasts[event.bucket])
            length = ended[step]["ended"] - ended[step]["ready"]
            assert 0 < sum(event.timing.collective for event in mine) <= length
            assert ended[step]["ready"] <= ended[step]["computed"] <= ended[step]["ended"]


def test_the_metrics_are_the_sums_of_the_lines_in_total_and_for_the_last_step(recorded):
    results, files, _ = recorded
    names = {
        "bytes_wire": "wire_bytes",
        "bytes_payload": "payload_bytes",
        "seconds": "collective_s",
        "queued_seconds": "queued_s",
        "encode_seconds": "encode_s",
        "decode_seconds": "decode_s",
    }
    for (_, before, metrics), lines in zip(results, files, strict=True):
        requests = [line for line in lines if line["type"] == "request"]
        last = [line for line in requests if line["step"] == STEPS - 1]
        assert metrics["comm/collectives"] == len(requests)
        assert metrics["comm/step/collectives"] == len(last)
        assert metrics["comm/steps"] == STEPS
        assert metrics["comm/step/steps"] == 1
        for name, field in names.items():
            assert metrics[f"comm/{name}"] == pytest.approx(sum(r[field] for r in requests), abs=1e-5)
            assert metrics[f"comm/step/{name}"] == pytest.approx(sum(r[field] for r in last), abs=1e-5)
            step = metrics[f"comm/{name}"] - before[f"comm/{name}"]
            assert metrics[f"comm/step/{name}"] == pytest.approx(step)
        times = [line for line in lines if line["type"] == "step"]
        exposed = sum(line["ended"] - line["computed"] for line in times)
        assert metrics["comm/exposed_seconds"] == pytest.approx(exposed, abs=1e-5)
        assert all(isinstance(value, int | float) for value in metrics.values())
        json.dumps(metrics)


def test_the_trace_has_a_track_for_each_rank_and_bucket(recorded):
    _, files, _ = recorded
    trace = chrome_trace(files)
    json.dumps(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    buckets = {line["bucket"] for line in files[0] if line["type"] == "bucket"}
    assert len(buckets) > 1
    assert set(tracks) == {(rank, track) for rank in range(2) for track in [0, *(b + 1 for b in buckets)]}
    assert {(span["pid"], span["tid"]) for span in spans} == set(tracks)
    assert min(span["ts"] for span in spans) == 0
    for track in tracks:  # spans of one track never lie on one another, or a viewer drops them
        mine = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if (s["pid"], s["tid"]) == track)
        assert all(end <= start + 1 for (_, end), (start, _) in itertools.pairwise(mine))
    only = chrome_trace(files, range(2, 3))["traceEvents"]
    assert {event["args"]["step"] for event in only if event["ph"] == "X"} == {2}


def test_a_cut_off_last_line_is_left_out_and_other_files_are_refused(recorded, tmp_path):
    _, _, folder = recorded
    text = (folder / "comm-0.jsonl").read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(text[:-20])
    assert len(read_lines(cut)) == len(text.splitlines()) - 1
    cut.write_text(text.replace('"format":1', '"format":9'))
    with pytest.raises(gl.InvalidValue, match="has format 9, this version reads up to 1"):
        read_lines(cut)
    for bad, message in (("", "does not begin with a run line"), ("{}\nnonsense\n{}", "line 2 is not JSON")):
        cut.write_text(bad)
        with pytest.raises(gl.InvalidValue, match=message):
            read_lines(cut)


def unwritable(rank, folder):
    ddp = DistributedDataParallel(build())
    path = f"{folder}/comm-{{rank}}.jsonl" if rank == 0 else f"{folder}/missing/comm-{{rank}}.jsonl"
    try:
        gl.attach(ddp, "Mean()", observer=gl.JsonLines(path), timeout=20)
    except (gl.RanksDisagree, FileNotFoundError) as error:
        message = f"{type(error).__name__}: {error}"
    gl.attach(ddp, "Mean()", timeout=20).close()  # and nothing is in the way of a second try
    return message


def test_a_file_that_cannot_be_written_is_refused_on_every_rank(tmp_path):
    first, second = run_ranks(unwritable, 2, str(tmp_path))
    assert "RanksDisagree: attach: the ranks differ in observer: rank 0 has ready" in first
    assert "rank 1: FileNotFoundError" in first
    assert second.startswith("FileNotFoundError")
    assert "missing/comm-1.jsonl" in second


def full_disk(rank, folder):
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("gradlane").addHandler(handler)
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.005)
    sink = gl.JsonLines(f"{folder}/full-{{rank}}")
    attachment = gl.attach(ddp, "Mean()", observer=sink, timeout=20)
    sink._flushed = float("-inf")  # so that it flushes in the first step
    steps_of(ddp, rank)
    attachment.close()
    return logged, attachment.metrics()["comm/steps"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_telemetry_and_not_the_training(tmp_path):
    for rank in range(2):
        (tmp_path / f"full-{rank}").symlink_to("/dev/full")
    for logged, steps in run_ranks(full_disk, 2, str(tmp_path)):
        assert steps == STEPS
        assert len([line for line in logged if "No space left" in line]) <= 2
        assert any("telemetry stops writing there" in line for line in logged)


def one_name_for_all(rank):
    with pytest.raises(gl.InvalidValue, match=r"one file for 2 ranks; .* comm-\{rank\}.jsonl"):
        gl.attach(DistributedDataParallel(build()), "Mean()", observer=gl.JsonLines("comm.jsonl"), timeout=20)
    with pytest.raises(gl.WrongType, match="observer 3 cannot be called; pass a function"):
        gl.attach(DistributedDataParallel(build()), "Mean()", observer=[3], timeout=20)


def test_bad_observers_are_refused():
    run_ranks(one_name_for_all, 2)


class Raising(gl.Sink):
    """Fails at the end of the second step."""

    def __init__(self):
        self.steps = []
        self.closed = False

    def step_ended(self, times):
        self.steps.append(times.step)
        if times.step == 1:
            raise ZeroDivisionError("a mean of nothing")

    def close(self):
        self.closed = True


def sink_raises(rank):
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: logged.append((entry.levelname, entry.getMessage(), entry.exc_info[0]))
    logging.getLogger("gradlane").addHandler(handler)
    sink = Raising()
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, "Mean()", observer=[sink] if rank else [], timeout=20) as attachment:
        steps_of(ddp, rank)
    return sink.steps, sink.closed, attachment.metrics()["comm/steps"], logged


def test_a_sink_that_raises_ends_no_training():
    (_, _, steps, quiet), (ended, closed, same, logged) = run_ranks(sink_raises, 2)
    assert steps == same == STEPS
    assert ended == [0, 1]
    assert closed
    assert quiet == []
    ((level, line, kind),) = logged
    assert (level, kind) == ("ERROR", ZeroDivisionError)
    assert "raised at the end of step 1; it gets no more events" in line


def observer_raises(rank):
    def observe(event):
        if rank == 1 and event.step == 1:
            raise ZeroDivisionError("a mean of nothing")

    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.005)
    with gl.attach(ddp, TwoPhases(), observer=observe, timeout=20) as attachment:
        steps_of(ddp, rank, 1)
        with pytest.raises((ZeroDivisionError, gl.PeerFailed), match="a mean of nothing"):
            ddp(data(rank, 1)).backward()
        steps_of(ddp, rank, 1)
    return attachment.step


def test_an_observer_that_raises_fails_the_step_on_all_ranks():
    assert run_ranks(observer_raises, 2) == [3, 3]


class Residual(gl.Strategy):
    async def reduce(self, bucket):
        await gl.note(residual_square=torch.tensor(float(bucket.step + 1)), kept=2.0)
        return gl.Reduced(await gl.all_reduce(bucket.flat))


def norms(rank):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.005)
    events = []
    with gl.attach(ddp, Residual(), observer=events.append) as attachment:
        assert attachment.metrics()["comm/residual_norm"] == 0
        steps_of(ddp, rank)
        buckets = len([event for event in events if event.step == STEPS - 1])
        metrics = attachment.metrics()
    assert buckets > 1
    # The norm over all buckets of the last step; other figures add up.
    assert metrics["comm/residual_norm"] == pytest.approx((buckets * STEPS) ** 0.5)
    assert metrics["comm/kept"] == 2 * len(events)
    assert metrics["comm/step/kept"] == 2 * buckets
    assert not [name for name in metrics if "square" in name]


def test_squares_are_shown_as_the_norm_of_the_last_step():
    run_ranks(norms, 2)


def uneven(rank):
    ddp = DistributedDataParallel(build())
    with gl.attach(ddp, "Mean()") as attachment:
        with ddp.join():
            steps_of(ddp, rank, 2 + 3 * rank)
        return attachment.metrics()


def test_a_joined_rank_counts_its_steps_too():
    first, second = run_ranks(uneven, 2)
    assert first["comm/steps"] == second["comm/steps"] == 5
    assert first["comm/step/bytes_wire"] == second["comm/step/bytes_wire"] > 0


def profiled(rank):
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.005)
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with gl.attach(ddp, TwoPhases()):
        steps_of(ddp, rank, 2)
        with profile(activities=[ProfilerActivity.CPU]) as plain:
            steps_of(ddp, rank, 1)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as whole:
            steps_of(ddp, rank, 1)
    return [{event.key for event in found.key_averages()} for found in (plain, whole)]


def test_spans_show_in_the_profiler():
    for plain, whole in run_ranks(profiled, 2):
        assert {"gradlane: encode", "gradlane: wait for the lane"} <= plain
        assert {"gradlane: encode", "gradlane: decode", "gradlane: all_reduce bucket 1 phase 1"} <= whole


def saved_and_resumed(rank, folder, steps):
    """Metrics after ``steps`` steps, saved there, beginning with what is saved."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=0.005)
    with gl.attach(ddp, "ErrorFeedback(Sharded(Int8()))") as attachment:
        if os.path.exists(os.path.join(folder, "manifest.json")):
            attachment.load(folder)
        steps_of(ddp, rank, steps)
        attachment.save(folder)
        return attachment.metrics()


def test_totals_go_on_after_a_resume(tmp_path):
    whole = run_ranks(saved_and_resumed, 2, str(tmp_path / "whole"), 5)
    first = run_ranks(saved_and_resumed, 2, str(tmp_path / "parts"), 4)
    second = run_ranks(saved_and_resumed, 2, str(tmp_path / "parts"), 1)
    for name in ("steps", "collectives", "bytes_raw", "bytes_payload", "bytes_wire", "ratio"):
        assert [m[f"comm/{name}"] for m in second] == [m[f"comm/{name}"] for m in whole]
        assert [m[f"comm/step/{name}"] for m in second] == [m[f"comm/step/{name}"] for m in whole]
    assert all(b["comm/seconds"] > a["comm/seconds"] > 0 for a, b in zip(first, second, strict=True))
    (third, *_) = run_ranks(saved_and_resumed, 3, str(tmp_path / "parts"), 1)
    assert third["comm/steps"] == 1  # other ranks: nobody's total goes on
