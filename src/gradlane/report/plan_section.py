"""The page's section on a plan: forecasts, step time against the rate of the link, more ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from .arm_styles import ArmStyle
from .axis import Axis
from .chart import Line, line_chart
from .csv_link import csv_link
from .documents import Plan, PlanResult
from .number_format import bit_rate, byte_size, duration, seconds_column, times
from .table import Row, Table

Mark = tuple[ArmStyle, float, float]


@dataclass(frozen=True)
class PlanSection:
    heading: str
    note: str
    table: Table
    chart: str
    csv: str
    legend: Sequence[ArmStyle]
    compute: str
    needed: str
    more: Table | None


def plan_section(plan: Plan, arms: Mapping[str, ArmStyle]) -> PlanSection:
    drawn = [arms[name] for name in plan.sweep.seconds]
    return PlanSection(
        heading=f"{plan.ranks} ranks, {bit_rate(plan.rate_bits, 3) if plan.rate_bits else 'link not known'}",
        note=plan.note,
        table=_table(plan.results, arms),
        chart=_chart(plan, arms) if plan.sweep.rates_bits else "",
        csv=csv_link(
            ("arm", "bit/s", "seconds per step"),
            [
                (arm, rate, took)
                for arm, line in plan.sweep.seconds.items()
                for rate, took in zip(plan.sweep.rates_bits, line, strict=True)
            ],
        ),
        legend=drawn,
        compute=duration(plan.compute_s),
        needed=f"{2 * plan.error:.0%}",
        more=_more(plan, arms) if plan.more_ranks else None,
    )


def _table(results: Sequence[PlanResult], arms: Mapping[str, ArmStyle]) -> Table:
    unit, steps = seconds_column(result.seconds for result in results)
    rows = [
        Row(
            arms[result.arm],
            "",
            "",
            [
                byte_size(result.node_bytes),
                step,
                times(result.speedup),
                result.loss,
                _verdict(result),
                _below(result),
            ],
        )
        for result, step in zip(results, steps, strict=True)
    ]
    headings = ["a node sends", f"step, {unit}", "speed-up", "loss", "verdict", "pays below"]
    return Table("Forecast of one step", headings, rows)


def _verdict(result: PlanResult) -> str:
    return f"{result.verdict}: {result.why}" if result.why else result.verdict


def _below(result: PlanResult) -> str:
    if not result.verdict:
        return ""
    if result.pays_at_any_rate:
        return "any rate"
    return "no rate" if result.pays_below_bits is None else bit_rate(result.pays_below_bits, 3)


def _chart(plan: Plan, arms: Mapping[str, ArmStyle]) -> str:
    rates, lines = plan.sweep.rates_bits, plan.sweep.seconds
    values = [seconds for line in lines.values() for seconds in line]
    x = Axis(rates[0], rates[-1], "bit", True)
    y = Axis(min(plan.compute_s, *values) / 1.3, max(values) * 1.1, "s", True)
    drawn = [Line(arms[arm], list(zip(rates, seconds, strict=True)), ()) for arm, seconds in lines.items()]
    marks = [mark for result in plan.results if (mark := _mark(plan, result, arms)) is not None]
    return line_chart("Step by rate of the link", x, y, "rate of the link", drawn, plan.compute_s, marks)


def _mark(plan: Plan, result: PlanResult, arms: Mapping[str, ArmStyle]) -> Mark | None:
    """Where the arm begins to pay, on its line."""
    rate, seconds = result.pays_below_bits, plan.sweep.seconds.get(result.arm)
    if rate is None or result.pays_at_any_rate or seconds is None:
        return None
    vertices = zip(plan.sweep.rates_bits, seconds, strict=True)
    for (low, slow), (high, fast) in pairwise(vertices):
        if low <= rate <= high:
            share = log(rate / low) / log(high / low)
            return arms[result.arm], rate, exp(log(slow) + share * log(fast / slow))
    return None


def _more(plan: Plan, arms: Mapping[str, ArmStyle]) -> Table:
    found = {(row.arm, row.ranks): row for row in plan.more_ranks}
    worlds = list(dict.fromkeys(row.ranks for row in plan.more_ranks))
    rows = []
    for arm in dict.fromkeys(row.arm for row in plan.more_ranks):
        mine = [found[arm, ranks] for ranks in worlds]
        cells = [
            f"{duration(row.seconds)} ({duration(row.low_s)} to {duration(row.high_s)}), {times(row.speedup)}"
            for row in mine
        ]
        rows.append(Row(arms[arm], "", "", cells))
    return Table("More ranks, extrapolated: step, its band, speed-up", [f"{n} ranks" for n in worlds], rows)
