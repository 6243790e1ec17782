"""Writes every request and every step as a line of JSON. docs/telemetry.md specifies the format."""

from __future__ import annotations

import json
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from .._version import __version__
from ..core.events import DeviceTimes, DeviceTiming, Event, StepTimes
from ..errors import InvalidValue, WrongState
from ..log import log
from .sink import RunInfo, Sink

FORMAT = 1
FLUSH_SECONDS = 1.0


class JsonLines(Sink):
    """Writes one file for each rank; ``{rank}`` in ``path`` stands for the rank.

    A full disk does not end the training run: it logs one warning and stops writing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIOWrapper | None = None
        self._events: list[Event] = []
        self._device_lines: list[dict[str, Any]] = []
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._flushed = 0.0

    def opened(self, run: RunInfo) -> None:
        if self._file is not None:
            raise WrongState(f"{self.path} is written by another attachment; give each its own JsonLines")
        if run.world > 1 and "{rank}" not in str(self.path):
            raise InvalidValue(
                f"JsonLines({str(self.path)!r}) would be one file for {run.world} ranks; "
                f"put the rank into its name: {self.path.stem}-{{rank}}{self.path.suffix or '.jsonl'}"
            )
        self._file = open(str(self.path).replace("{rank}", str(run.rank)), "w", encoding="utf-8")  # noqa: SIM115
        self._write(
            [
                {
                    "type": "run",
                    "format": FORMAT,
                    "gradlane": __version__,
                    "rank": run.rank,
                    "world": run.world,
                    "strategy": run.strategy,
                    "kernels": run.kernels,
                    "clock": time.time() - time.perf_counter(),
                }
            ]
        )

    def __call__(self, event: Event) -> None:
        self._events.append(event)

    def device_timed(self, times: DeviceTimes) -> None:
        self._device_lines = [_device(times.step, request) for request in times.requests]
        self._device_lines.append(_device_step(times))

    def step_ended(self, times: StepTimes) -> None:
        events, self._events = self._events, []
        on_device, self._device_lines = self._device_lines, []
        lines = [line for event in events for line in self._lines(event)]
        self._write([*lines, *on_device, _step(times)])

    def close(self) -> None:
        """Write the remaining events. An attachment calls it when it closes."""
        if self._file is not None:
            self._write([line for event in self._events for line in self._lines(event)])
            self._end()

    def _lines(self, event: Event) -> list[dict[str, Any]]:
        request = _request(event)
        if self._layouts.get(event.bucket) == event.parameters:
            return [request]
        self._layouts[event.bucket] = event.parameters
        layout = {"type": "bucket", "step": event.step, "bucket": event.bucket}
        return [{**layout, "parameters": list(event.parameters)}, request]

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._file is None:
            return
        try:
            self._file.write("".join(map(_encoded, lines)))
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            log.warning("%s: %s; telemetry stops writing there", self.path, error)
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        self._events.clear()
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.warning("%s: %s; the last lines are lost", self.path, error)


def _encoded(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _request(event: Event) -> dict[str, Any]:
    line: dict[str, Any] = {
        "type": "request",
        "step": event.step,
        "bucket": event.bucket,
        "phase": event.phase,
        "kind": event.kind,
        "op": event.op,
        "over": event.over,
        "payload_bytes": event.payload_bytes,
        "wire_bytes": event.wire_bytes,
    }
    if (timing := event.timing) is not None:
        line |= {
            "began": round(timing.began, 7),
            "encode_s": round(timing.encode, 7),
            "queued_s": round(timing.queued, 7),
            "collective_s": round(timing.collective, 7),
            "decode_s": round(timing.decode, 7),
        }
    return line


def _device(step: int, timing: DeviceTiming) -> dict[str, Any]:
    return {
        "type": "device",
        "step": step,
        "bucket": timing.bucket,
        "phase": timing.phase,
        "kind": timing.kind,
        "began": round(timing.began, 7),
        "encode_s": round(timing.encode, 7),
        "collective_s": round(timing.collective, 7),
        "decode_s": round(timing.decode, 7),
    }


def _device_step(times: DeviceTimes) -> dict[str, Any]:
    return {
        "type": "device_step",
        "step": times.step,
        "computed": round(times.computed, 7),
        "ended": round(times.ended, 7),
    }


def _step(times: StepTimes) -> dict[str, Any]:
    return {
        "type": "step",
        "step": times.step,
        "ready": round(times.ready, 7),
        "computed": round(times.computed, 7),
        "ended": round(times.ended, 7),
    }
