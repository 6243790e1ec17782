"""Forecasts of several strategies on one link, and whether one of them pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .beat import Beat
from .curves import Curves
from .pipeline import Forecast, step_seconds
from .work import BucketWork, dense_work

DDP = "ddp"
ERROR = 0.05  # of a forecast, at least
Verdict = Literal["pays", "even", "loses"]


def forecasts(
    beat: Beat, works: Mapping[str, Sequence[BucketWork]], curves: Curves, cores: float
) -> dict[str, Forecast]:
    """One forecast for each strategy, and one of DDP without a hook, under ``ddp``."""
    sizes = [bucket.dense_bytes for bucket in next(iter(works.values()))]
    found = {DDP: ddp_forecast(beat, sizes, curves, cores)}
    for text, buckets in works.items():
        found[text] = step_seconds(beat, buckets, curves, cores=cores, commit=curves.world > 1)
    return found


def ddp_forecast(beat: Beat, bucket_bytes: Sequence[int], curves: Curves, cores: float) -> Forecast:
    return step_seconds(beat, dense_work(bucket_bytes), curves.of_ddp, cores=cores, commit=False)


def is_off(dense: Forecast) -> bool:
    """Whether nothing can pay: DDP itself is nearly as fast as compute alone."""
    return dense.seconds <= (1 + ERROR) * dense.compute


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    speedup: float
    """Seconds of DDP over those of the strategy."""
    why: str


def judge(found: Forecast, dense: Forecast, error: float = ERROR) -> Judgement:
    """A strategy pays if it gains more than twice the error of a forecast."""
    error = max(error, ERROR)
    speedup = dense.seconds / found.seconds
    if is_off(dense):
        return Judgement(
            "even" if speedup > 1 - error else "loses", speedup, "the link is not the bottleneck"
        )
    if speedup > 1 + 2 * error:
        return Judgement("pays", speedup, "")
    if speedup >= 1 - error:
        return Judgement("even", speedup, "")
    return Judgement("loses", speedup, _why(found, dense))


def _why(found: Forecast, dense: Forecast) -> str:
    """What it has most of, beyond DDP."""
    causes = {
        "work": found.work,
        "link": found.network - dense.network,
        "latency": found.latency - dense.latency,
    }
    cause, seconds = max(causes.items(), key=lambda pair: pair[1])
    return f"{cause} +{_ms(seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
