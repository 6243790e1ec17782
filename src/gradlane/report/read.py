"""Reads and checks the JSON of ``gradlane bench`` and ``gradlane train``."""

from __future__ import annotations

import json
from pathlib import Path

from .._version import __version__
from ..errors import InvalidValue
from .documents import (
    FAILED,
    PHASES,
    Bench,
    BenchResult,
    Link,
    Origin,
    Point,
    RankStep,
    Request,
    Train,
    TrainResult,
)
from .fields import WAY_OUT, Fields

FORMAT = 1  # the one format this version reads
BENCH_FIGURES = (
    *("median_s", "min_s", "cpu_s", "exposed_s", "ledger_bytes", "interface_bytes", "speedup", "of_limit"),
    *("limit_s", "ratio", "steps"),
)
TRAIN_FIGURES = (
    *("final_loss", "gap", "gap_interval", "bytes_per_step", "seconds_per_step"),
    *("to_target_s", "to_target_bytes", "to_target_steps"),
)


def load(path: Path) -> Bench | Train:
    """The document in a file; ``InvalidValue`` says what is wrong with one that cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_figure)
    except FileNotFoundError:
        raise InvalidValue(
            f"there is no file {path}; give the JSON that `gradlane bench` or `gradlane train` wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} is not JSON ({error}); {WAY_OUT}") from None
    fields = Fields(content, str(path))
    kind = fields.values.get("kind")
    if kind not in ("bench", "train"):
        raise InvalidValue(f"{path} has kind {kind!r}, not 'bench' or 'train'; {WAY_OUT}")
    written = fields.whole("format")
    if written != FORMAT:
        raise InvalidValue(
            f"{path} has format {written}, gradlane {__version__} reads format {FORMAT}; "
            f"use the gradlane that wrote it, or run `gradlane {kind}` again"
        )
    if not fields.each("results"):
        raise InvalidValue(f"{path} holds no results; run `gradlane {kind}` until one arm is done")
    return _bench(fields, path) if kind == "bench" else _train(fields, path)


def _origin(fields: Fields, path: Path) -> Origin:
    made = fields.inner("made")
    return Origin(
        file=path.name,
        at=made.text("at", ""),
        command=made.text("command", ""),
        made={key: value for key, value in made.values.items() if key not in ("at", "command")},
        settings=fields.inner("settings").values,
        ended=fields.text("ended", ""),
    )


def _link(fields: Fields, name: str) -> Link:
    return Link(
        fields.text(name), fields.number("rate_bits"), fields.flag("emulated"), fields.text("note", "")
    )


def _bench(fields: Fields, path: Path) -> Bench:
    return Bench(_origin(fields, path), tuple(_bench_result(result) for result in fields.each("results")))


def _bench_result(fields: Fields) -> BenchResult:
    phases = fields.inner("phases") if fields.values.get("phases") is not None else None
    return BenchResult(
        link=_link(fields, "link"),
        ranks=fields.whole("ranks"),
        arm=fields.text("arm"),
        status=fields.text("status"),
        detail=fields.text("detail", ""),
        figures={key: fields.number(key) for key in BENCH_FIGURES},
        phases=_segments(phases) if phases else {},
        timeline=tuple(_rank_step(step) for step in fields.each("timeline")),
    )


def _rank_step(fields: Fields) -> RankStep:
    return RankStep(
        rank=fields.whole("rank"),
        step=fields.whole("step"),
        backward_s=fields.number("backward_s") or 0.0,
        end_s=fields.number("end_s") or 0.0,
        requests=tuple(
            Request(
                bucket=request.whole("bucket"),
                phase=request.whole("phase"),
                kind=request.text("kind"),
                payload_bytes=request.number("payload_bytes"),
                start_s=request.number("start_s") or 0.0,
                segments=_segments(request),
            )
            for request in fields.each("requests")
        ),
    )


def _segments(fields: Fields) -> dict[str, float]:
    return {phase: max(0.0, fields.number(f"{phase}_s") or 0.0) for phase in PHASES}


def _train(fields: Fields, path: Path) -> Train:
    return Train(
        origin=_origin(fields, path),
        link=_link(fields.inner("link"), "name"),
        unit=fields.text("unit", ""),
        target=fields.number("target"),
        results=tuple(
            TrainResult(
                arm=result.text("arm"),
                status=result.text("status"),
                detail=result.text("detail", ""),
                figures={key: result.number(key) for key in TRAIN_FIGURES},
                seeds=tuple(_curve(run) for run in result.each("runs") if run.text("status") not in FAILED),
            )
            for result in fields.each("results")
        ),
    )


def _curve(fields: Fields) -> tuple[Point, ...]:
    names = ("steps", "loss", "bytes", "seconds")
    columns = [fields.numbers(name) for name in names]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{len(column)} {name}" for name, column in zip(names, columns, strict=True))
        raise InvalidValue(f"{fields.place} has {lengths}: they must be as many; {WAY_OUT}")
    rows = zip(*columns, strict=True)
    return tuple(Point(step, loss, sent, spent) for step, loss, sent, spent in rows if step is not None)


def _no_figure(constant: str) -> None:
    """NaN and Infinity, which Python writes though JSON has none."""
