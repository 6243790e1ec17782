"""The record of ``gradlane plan``: forecasts of all strategies, crossings, other rates, more ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.scopes import scopes_of
from ..plan.crossings import FASTEST, crossings
from ..plan.curves import Curves
from ..plan.echo import work_of
from ..plan.forecast import DDP, Judgement, forecasts, is_off, judge
from ..plan.pipeline import Forecast
from ..plan.scale import at_rate, for_ranks, with_latency
from ..plan.stragglers import STEPS, straggling_steps
from ..plan.work import BucketWork, dense_work
from ..plan.works import Works
from ..simulate.buckets import nodes_of
from ..strategies.auto.ladder import loss_class
from .plan_figures import PlanFigures
from .record import FORMAT, command_line, provenance

RATES = 19  # of a sweep
SWEPT = (0.01, 10.0)  # times the link's rate; further up, if something pays there
UNSURE = (0.5, 2.0)  # factors of the latency, for another number of ranks


def plan_record(
    figures: PlanFigures,
    settings: Mapping[str, Any],
    *,
    more_ranks: Sequence[int] = (),
    note: str = "",
) -> dict[str, Any]:
    beat, curves, cores = figures.beat, figures.curves, figures.cores
    works = figures.works
    found = _forecasts(figures, works, curves)
    dense = found[DDP]
    below = crossings(beat, works, curves, cores, figures.error)
    results = [
        _result(
            arm, forecast, judge(forecast, dense, figures.error), _node_bytes(figures, arm), below.get(arm)
        )
        for arm, forecast in found.items()
    ]
    return {
        "kind": "plan",
        "format": FORMAT,
        "made": provenance(command_line()),
        "settings": dict(settings),
        "ended": "complete",
        "note": note,
        "error": figures.error,
        "ddp_s": figures.ddp_s,
        "off": is_off(dense),
        "ranks": curves.world,
        "rate_bits": 8 * curves.bytes_per_s,
        "latency_s": curves.curve("all_reduce").latency,
        "compute_s": beat.compute,
        "results": results,
        "sweep": _sweep(figures, works, [rate for rate in below.values() if rate and rate < FASTEST]),
        "more_ranks": [row for ranks in more_ranks for row in _more_ranks(figures, ranks)],
        "figures": figures.as_dict(),
    }


def _result(
    arm: str, forecast: Forecast, verdict: Judgement, node_bytes: int, below: float | None
) -> dict[str, Any]:
    return {
        "arm": arm,
        "loss": "exact" if arm == DDP else loss_class(arm),
        "node_bytes": node_bytes,
        "seconds": forecast.seconds,
        "exposed_s": forecast.exposed,
        "work_s": forecast.work,
        "network_s": forecast.network,
        "latency_s": forecast.latency,
        "speedup": verdict.speedup,
        "verdict": "" if arm == DDP else verdict.verdict,
        "why": "" if arm == DDP else verdict.why,
        "pays_below_bits": None if below is None else 8 * below,
        "pays_at_any_rate": below == FASTEST,
    }


def _node_bytes(figures: PlanFigures, arm: str) -> int:
    """What a node, or a rank that has a link of its own, sends to the others in a step."""
    return sum(
        figures.curves.link_bytes(phase.kind, phase.over, phase.payload_bytes)
        for bucket in figures.works.get(arm) or dense_work(figures.bucket_bytes)
        for phase in bucket.phases
        if phase.over != "node"
    )


def _sweep(figures: PlanFigures, works: Works, crossed: Sequence[float]) -> dict[str, Any]:
    """Seconds of a step by the rate of the link, for each strategy."""
    low, high = (factor * figures.curves.bytes_per_s for factor in SWEPT)
    high = max([high, *(2 * rate for rate in crossed)])
    rates = [low * (high / low) ** (step / (RATES - 1)) for step in range(RATES)]
    lines: dict[str, list[float]] = {}
    for rate in rates:
        for arm, forecast in _forecasts(figures, works, at_rate(figures.curves, rate)).items():
            lines.setdefault(arm, []).append(forecast.seconds)
    return {"rates_bits": [8 * rate for rate in rates], "seconds": lines}


def _forecasts(figures: PlanFigures, works: Works, curves: Curves) -> dict[str, Forecast]:
    """Of DDP too, which is all where nothing was timed."""
    if not works:
        return {DDP: replace(figures, curves=curves).dense}
    return forecasts(figures.beat, works, curves, figures.cores)


def _more_ranks(figures: PlanFigures, ranks: int) -> list[dict[str, Any]]:
    """The same step with more ranks, each bound by the latency being half or double of what is thought."""
    curves = for_ranks(figures.curves, ranks)
    scopes = scopes_of(0, nodes_of(ranks, curves.per_node))
    works = {text: work_of(text, figures.layouts, scopes, figures.dtype) for text in figures.works}
    middle, low, high = (
        _seconds(figures, works, changed) for changed in (curves, *(with_latency(curves, f) for f in UNSURE))
    )
    return [
        {
            "ranks": ranks,
            "arm": arm,
            "seconds": middle[arm],
            "low_s": min(low[arm], middle[arm]) * (1 - figures.error),
            "high_s": max(high[arm], middle[arm]) * (1 + figures.error),
            "speedup": middle[DDP] / middle[arm],
        }
        for arm in middle
    ]


def _seconds(figures: PlanFigures, works: Works, curves: Curves) -> dict[str, float]:
    """With the wait for the slowest rank."""
    every = {DDP: dense_work(figures.bucket_bytes), **works}
    found = _forecasts(figures, works, curves)
    return {arm: found[arm].seconds + _waiting(figures, arm, every[arm], curves) for arm in found}


def _waiting(figures: PlanFigures, arm: str, buckets: Sequence[BucketWork], curves: Curves) -> float:
    """Seconds of a step in which a rank waits for slower ones, on average."""
    if not figures.spread:
        return 0.0
    unequal, equal = (
        straggling_steps(figures.beat, buckets, curves, spread, commit=arm != DDP, steps=steps).mean()
        for spread, steps in ((figures.spread, STEPS), (0.0, 1))
    )
    return max(float(unequal - equal), 0.0)
