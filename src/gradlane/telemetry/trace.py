"""A Chrome trace (chrome://tracing, ui.perfetto.dev) of all ranks, from the files of ``JsonLines``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidValue
from .jsonl import FORMAT

PARTS = ("encode", "queued", "collective", "decode")
DEVICE_PARTS = ("encode", "collective", "decode")
BACKWARD_TRACK = 0  # bucket b is track b + 1
DEVICE_TRACK = 1_000_000  # one stream, so one track
Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines that ``JsonLines`` wrote, without an incomplete last line."""
    lines: list[Line] = []
    texts = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number == len(texts) and lines:
                break  # the run was killed during a write
            raise InvalidValue(
                f"{path}, line {number} is not JSON: {error}; pass files of JsonLines"
            ) from None
    if not lines or lines[0].get("type") != "run":
        raise InvalidValue(f"{path} does not begin with a run line; pass files that JsonLines wrote")
    if lines[0]["format"] > FORMAT:
        raise InvalidValue(f"{path} has format {lines[0]['format']}, this version reads up to {FORMAT}")
    return lines


def chrome_trace(runs: Sequence[Sequence[Line]], steps: range | None = None) -> dict[str, Any]:
    """One process per rank, in it one track for backward and one per bucket. A device adds one: what the
    lane's stream did. The tracks of buckets then show when the host called it.

    Ranks on one machine share a clock. Those of different machines are aligned by their wall clocks, as
    exactly as these agree.
    """
    events: list[Line] = []
    for lines in runs:
        run = lines[0]
        events += _names(run, lines)
        wanted = [line for line in lines[1:] if steps is None or line["step"] in steps]
        clock = float(run["clock"])
        for line in wanted:
            if line["type"] == "request" and "began" in line:
                events += _request(line, run["rank"], clock)
            elif line["type"] == "device":
                events += _on_device(line, run["rank"], clock)
            elif line["type"] == "device_step":
                events += _device_step(line, run["rank"], clock)
            elif line["type"] == "step":
                events += _step(line, run["rank"], clock)
    if not any(event["ph"] == "X" for event in events):
        raise InvalidValue("there is no timed request in these lines; record with gradlane.JsonLines")
    start = min(event["ts"] for event in events if event["ph"] == "X")
    for event in events:
        if event["ph"] == "X":
            event["ts"] -= start
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(run: Line, lines: Sequence[Line]) -> Iterable[Line]:
    rank = run["rank"]
    yield _named("process_name", rank, 0, f"rank {rank}: {run['strategy']}")
    yield _named("thread_name", rank, BACKWARD_TRACK, "backward")
    for bucket in sorted({line["bucket"] for line in lines[1:] if line["type"] == "bucket"}):
        yield _named("thread_name", rank, bucket + 1, f"bucket {bucket}")
    if any(line["type"] == "device" for line in lines[1:]):
        yield _named("thread_name", rank, DEVICE_TRACK, "device, the lane's stream")


def _named(what: str, rank: int, track: int, name: str) -> Line:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


def _request(line: Line, rank: int, clock: float) -> Iterable[Line]:
    details = {key: line[key] for key in ("step", "phase", "payload_bytes", "wire_bytes")}
    return _parts(line, PARTS, rank, line["bucket"] + 1, clock, details)


def _on_device(line: Line, rank: int, clock: float) -> Iterable[Line]:
    details = {key: line[key] for key in ("step", "bucket", "phase")}
    return _parts(line, DEVICE_PARTS, rank, DEVICE_TRACK, clock, details)


def _parts(
    line: Line, parts: Sequence[str], rank: int, track: int, clock: float, details: Line
) -> Iterable[Line]:
    start = clock + line["began"]
    for part in parts:
        seconds = line[f"{part}_s"]
        name = line["kind"] if part == "collective" else part
        if seconds:
            yield _span(name, rank, track, start, seconds, details)
        start += seconds


def _device_step(line: Line, rank: int, clock: float) -> Iterable[Line]:
    exposed = line["ended"] - line["computed"]
    if exposed > 0:
        start = clock + line["computed"]
        yield _span("exposed on the device", rank, BACKWARD_TRACK, start, exposed, {"step": line["step"]})


def _step(line: Line, rank: int, clock: float) -> Iterable[Line]:
    ready, computed, ended = line["ready"], line["computed"], line["ended"]
    details = {"step": line["step"]}
    name = f"step {line['step']}: backward, from the first bucket on"
    yield _span(name, rank, BACKWARD_TRACK, clock + ready, computed - ready, details)
    yield _span("exposed", rank, BACKWARD_TRACK, clock + computed, ended - computed, details)


def _span(name: str, rank: int, track: int, start: float, seconds: float, details: Line) -> Line:
    ts, dur = start * 1e6, seconds * 1e6  # microseconds
    return {"ph": "X", "name": name, "pid": rank, "tid": track, "ts": ts, "dur": dur, "args": details}
