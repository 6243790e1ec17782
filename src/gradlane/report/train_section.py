"""The page's section on a train document: arms, learning rates, and loss against steps, bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .arm_styles import ArmStyle
from .axis import Axis, linear, spending, towards_lowest
from .bars import Bar, DrawnBar, draw
from .chart import Line, Vertex, line_chart
from .csv_link import csv_link
from .documents import FAILED, Point, Train, TrainResult, Trial
from .number_format import DASH, byte_size, duration, plain, seconds_column, signed
from .phase_bars import phase_bars, phase_csv
from .table import Row, Table, status_row

Curve = Sequence[Point]


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    csv: str
    missing: Sequence[ArmStyle]  # in the legend, but without a line in this chart


@dataclass(frozen=True)
class TrainSection:
    link: str
    where: str
    note: str
    unit: str
    target: str
    seeds: int
    table: Table
    tuning: Table | None
    charts: Sequence[Chart]
    step_times: Sequence[DrawnBar]
    step_times_csv: str
    phases: Sequence[DrawnBar]
    phases_csv: str
    legend: Sequence[ArmStyle]
    cut_off: bool


def train_section(train: Train, arms: Mapping[str, ArmStyle]) -> TrainSection:
    drawn = [result for result in train.results if result.status not in FAILED and any(result.seeds)]
    curves = {result.arm: [seed for seed in result.seeds if seed] for result in drawn}
    means = {name: mean_curve(seeds) for name, seeds in curves.items()}
    loss_axis, cut_off = _loss_axis(curves, train.target)
    charts = []
    for what, x_title, unit, spent_at in (
        ("steps", "steps", "", lambda point: point.step),
        ("bytes", "sent by one rank", "B", lambda point: point.bytes),
        ("seconds", "training time", "s", lambda point: point.seconds),
    ):
        lines = [
            Line(arms[name], _vertices(means[name], spent_at), [_vertices(seed, spent_at) for seed in seeds])
            for name, seeds in curves.items()
        ]
        charts.append(_chart(f"Loss against {what}", x_title, unit, lines, loss_axis, train.target))
    spent = [(result.arm, result.phases, None) for result in drawn]
    return TrainSection(
        link=train.link.name,
        where=train.link.where,
        note=train.link.note,
        unit=train.unit,
        target="" if train.target is None else f"{train.target:.4g}",
        seeds=max((len(seeds) for seeds in curves.values()), default=0),
        table=_table(train.results, train.unit, arms),
        tuning=_tuning(train.results, train.unit, arms),
        charts=charts if drawn else [],
        step_times=_step_times(drawn, arms),
        step_times_csv=csv_link(
            ("arm", "seconds per step"), [(result.arm, result.seconds_per_step) for result in drawn]
        ),
        phases=phase_bars(spent, arms),
        phases_csv=phase_csv(spent),
        legend=[arms[name] for name in curves],
        cut_off=cut_off,
    )


def _step_times(results: Sequence[TrainResult], arms: Mapping[str, ArmStyle]) -> list[DrawnBar]:
    found = []
    for result in results:
        if (seconds := result.seconds_per_step) is not None:
            arm = arms[result.arm]
            found.append(Bar(arm, [(arm.style, seconds)], duration(seconds)))
    return draw(found, "Time of a step")


def mean_curve(seeds: Sequence[Curve]) -> list[Point]:
    """The mean over seeds at every step that all of them reached.

    If one seed has no loss at a step, the mean has none: a mean of the others would flatter the arm.
    """
    by_step = [{point.step: point for point in seed} for seed in seeds]
    mean = []
    for step in sorted(set.intersection(*(set(points) for points in by_step))):
        points = [known[step] for known in by_step]
        mean.append(
            Point(
                step,
                _mean([point.loss for point in points]),
                _mean([point.bytes for point in points]),
                _mean([point.seconds for point in points]),
            )
        )
    return mean


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _loss_axis(curves: Mapping[str, Sequence[Curve]], target: float | None) -> tuple[Axis, bool]:
    """An axis for all losses up to a little above the first ones; a diverging arm is clipped there."""
    losses = [point.loss for seeds in curves.values() for seed in seeds for point in seed]
    known = [loss for loss in losses if loss is not None]
    starts = [seed[0].loss for seeds in curves.values() for seed in seeds if seed[0].loss is not None]
    if target is not None:
        known.append(target)
    if not known or not starts:
        return linear(known), False
    highest = max(starts) + 0.25 * (max(starts) - min(known)) if max(starts) > min(known) else max(known)
    shown = [loss for loss in known if loss <= highest]
    return towards_lowest(shown), len(shown) < len(known)


def _vertices(curve: Curve, spent_at: Callable[[Point], float | None]) -> list[Vertex]:
    pairs = [(spent_at(point), point.loss) for point in curve]
    return [(across, loss) for across, loss in pairs if across is not None]


def _chart(
    title: str, x_title: str, unit: str, lines: Sequence[Line], y: Axis, target: float | None
) -> Chart:
    reached = [[across for across, _ in vertices] for line in lines for vertices in (line.mean, *line.seeds)]
    ends = [max(spent) for spent in reached if spent]
    starts = [min(x for x in spent if x > 0) for spent in reached if any(x > 0 for x in spent)]
    x = spending(ends, starts, unit)
    missing = [
        line.arm
        for line in lines
        if not any(
            loss is not None and x.shows(across)
            for vertices in (line.mean, *line.seeds)
            for across, loss in vertices
        )
    ]
    scale = ", log scale" if x.logarithmic else ""
    data = [
        (line.arm.name, seed, across, loss)
        for line in lines
        for seed, vertices in enumerate(line.seeds)
        for across, loss in vertices
    ]
    csv = csv_link(("arm", "seed", title.removeprefix("Loss against "), "loss"), data)
    return Chart(title, line_chart(title, x, y, x_title + scale, lines, target), csv, missing)


def _table(results: Sequence[TrainResult], unit: str, arms: Mapping[str, ArmStyle]) -> Table:
    step_unit, step_times = seconds_column(result.seconds_per_step for result in results)
    target_unit, target_times = seconds_column(result.to_target_s for result in results)
    tuned = any(result.tuning for result in results)
    rows = []
    for at, result in enumerate(results):
        cells = [
            *([_rate(result.lr)] if tuned else []),
            plain(result.final_loss, 4),
            signed(result.gap, result.gap_interval),
            byte_size(result.bytes_per_step),
            step_times[at],
            target_times[at],
            byte_size(result.to_target_bytes),
        ]
        rows.append(status_row(arms[result.arm], result.status, result.detail, cells))
    headings = ["best rate"] if tuned else []
    headings += [f"final loss, {unit}" if unit else "final loss", "gap to dense", "sent per step"]
    headings += [f"per step, {step_unit}", f"to target, {target_unit}", "to target, sent"]
    return Table("Loss and cost of each arm", headings, rows)


def _tuning(results: Sequence[TrainResult], unit: str, arms: Mapping[str, ArmStyle]) -> Table | None:
    """A row for each arm, a column for each learning rate; None if nothing was tuned."""
    rates = sorted({trial.lr for result in results for trial in result.tuning})
    if not rates:
        return None
    rows = []
    for result in results:
        found = {trial.lr: trial for trial in result.tuning}
        cells = [_trial(found.get(rate)) for rate in rates]
        rows.append(Row(arms[result.arm], "", result.remark, [*cells, _rate(result.lr)]))
    title = "Final loss at each learning rate" + (f", {unit}" if unit else "")
    return Table(title, [*(_rate(rate) for rate in rates), "best rate"], rows)


def _trial(trial: Trial | None) -> str:
    if trial is None:
        return DASH
    return trial.status if trial.loss is None else plain(trial.loss, 4)


def _rate(rate: float | None) -> str:
    return DASH if rate is None else f"{rate:g}"
