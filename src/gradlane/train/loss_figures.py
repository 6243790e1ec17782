"""The figures of all arms: losses, paired gaps to dense training, costs, and the cost to reach a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from ..bench.arms import DDP, described
from .learning_rates import tuning_figures, why_untuned
from .seed_run import FAILED, SeedRun

TARGET_SHARE = 0.02  # of dense's decrease, above its final loss: reached shortly before the end
# Student's t, 0.975 quantile, for 1 to 29 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical
# Methods, section 1.3.6.7.2.
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
NO_FIGURES = dict.fromkeys(
    (
        *("final_loss", "gap", "gap_interval", "bytes_per_step", "seconds_per_step", "phases"),
        *("to_target_s", "to_target_bytes", "to_target_steps"),
    )
)


class Cost(NamedTuple):
    steps: float
    bytes: float
    seconds: float


def final_step(runs: Mapping[str, Sequence[SeedRun]]) -> int | None:
    """The last evaluation that every arm has of some seed; arms that failed do not count.

    So a run that ended early is never averaged or compared with a complete one.
    """
    reached = [
        {step for run in own for step in run.steps}
        for own in runs.values()
        if own and not any(run.status in FAILED for run in own)
    ]
    return max(set.intersection(*reached), default=None) if reached else None


def default_target(dense: Sequence[SeedRun], final: int) -> float | None:
    """Dense's mean final loss plus a small share of its decrease; None if it did not learn.

    At least the final loss of its worst seed: dense itself must reach the target with every seed.
    """
    counted = _counted(dense, final)
    ends = [run.loss_at(final) for run in counted]
    start, end = _mean([run.loss[0] for run in counted]), _mean(ends)
    if start is None or end is None or start <= end:
        return None
    return max(end + TARGET_SHARE * (start - end), *(loss for loss in ends if loss is not None))


def figures(
    runs: Sequence[SeedRun], dense: Sequence[SeedRun], final: int, target: float | None
) -> dict[str, Any]:
    """The figures of one arm, over the seeds in which it reached the final step."""
    counted = _counted(runs, final)
    if not counted:
        return dict(NO_FIGURES)
    gap, interval = paired_gap(counted, _counted(dense, final), final)
    steps = sum(run.steps[-1] for run in counted)
    step_seconds = [seconds for run in counted for seconds in run.step_seconds]
    costs = [cost_to(run, target) for run in counted] if target is not None else [None]
    return NO_FIGURES | {
        "final_loss": _mean([run.loss_at(final) for run in counted]),
        "gap": gap,
        "gap_interval": interval,
        "bytes_per_step": sum(run.bytes[-1] for run in counted) / steps if steps else None,
        "seconds_per_step": median(step_seconds) if step_seconds else None,
        "phases": phases_of_runs(counted),
        "to_target_s": _mean([cost and cost.seconds for cost in costs]),
        "to_target_bytes": _mean([cost and cost.bytes for cost in costs]),
        "to_target_steps": _mean([cost and cost.steps for cost in costs]),
    }


def phases_of_runs(runs: Sequence[SeedRun]) -> dict[str, float] | None:
    """Mean seconds per step and rank in each phase; None of an arm without a strategy."""
    samples = [sample for run in runs for sample in run.phases]
    if not samples:
        return None
    return {f"{phase}_s": fmean(sample[phase] for sample in samples) for phase in samples[0]}


def paired_gap(
    runs: Sequence[SeedRun], dense: Sequence[SeedRun], final: int
) -> tuple[float | None, float | None]:
    """Mean difference to dense, seed by seed, and the half width of its 95 % interval (two seeds or more)."""
    base = {run.seed: run.loss_at(final) for run in dense}
    gaps = []
    for run in runs:
        loss, other = run.loss_at(final), base.get(run.seed)
        if loss is None or other is None:  # the mean of the others would flatter the arm
            return None, None
        gaps.append(loss - other)
    if len(gaps) < 2:
        return fmean(gaps), None
    return fmean(gaps), T_975[len(gaps) - 2] * stdev(gaps) / math.sqrt(len(gaps))


def cost_to(run: SeedRun, target: float) -> Cost | None:
    """The cost until the loss first reaches the target, interpolated between two evaluations."""
    before: tuple[float, Cost] | None = None
    for step, loss, sent, seconds in zip(run.steps, run.loss, run.bytes, run.seconds, strict=True):
        here = Cost(step, sent, seconds)
        if loss is not None and loss <= target:
            if before is None:
                return here
            share = (before[0] - target) / (before[0] - loss)
            return Cost(*(a + share * (b - a) for a, b in zip(before[1], here, strict=True)))
        before = None if loss is None else (loss, here)
    return None


def result(
    arm: str,
    runs: Mapping[str, Sequence[SeedRun]],
    seeds: int,
    final: int | None,
    target: float | None,
    tried: Sequence[SeedRun] = (),
) -> dict[str, Any]:
    """An arm's entry in the document. ``tried`` are its runs with the tuning seed, one for each rate."""
    own = [run for run in runs[arm] if run.steps or run.status in FAILED]
    status, detail = why_untuned(tried) if tried and not runs[arm] else _status(own, seeds)
    found = dict(NO_FIGURES) if final is None else figures(own, runs[DDP], final, target)
    about = {"arm": arm, "strategy": described(arm), "status": status, "detail": detail}
    rates = tuning_figures(tried, runs[arm])
    return {**about, **rates, **found, "runs": [run.as_json() for run in own]}


def _status(runs: Sequence[SeedRun], seeds: int) -> tuple[str, str]:
    """The worst status of the runs, and its detail."""
    if not runs:
        return "not run", "the run ended before its first evaluation"
    for status in (*FAILED, "diverged"):
        for run in runs:
            if run.status == status:
                return status, f"seed {run.seed}, {run.detail}"
    complete = sum(run.status == "ok" for run in runs)
    if complete == seeds:
        return "ok", ""
    cut = "".join(
        f"; seed {run.seed} was last evaluated after {run.steps[-1]} steps"
        for run in runs
        if run.status != "ok"
    )
    return "partial", f"{complete} of {seeds} seeds are complete{cut}"


def _counted(runs: Sequence[SeedRun], final: int) -> list[SeedRun]:
    return [run for run in runs if final in run.steps and run.status not in FAILED]


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one of the values is None."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
