"""The options that ``attach``, ``Reducer`` and every integration take: listed and checked in one place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypedDict

from .agree.limits import checked_ranks_per_node, checked_timeout
from .errors import WrongType
from .feed.drift import checked_every
from .feed.loss_scale import Scaler, checked_scaler
from .feed.nonfinite import Policy, checked_policy
from .telemetry.sink import Observer, observers_of


class Options(TypedDict, total=False):
    """What ``**options`` may be; ``attach`` says what each does. Frameworks with a scaler give their own."""

    observer: Observer | Iterable[Observer] | None
    timeout: float | timedelta | None
    ranks_per_node: int | None
    nonfinite: Policy
    verify_every: int | None


class ScaledOptions(Options, total=False):
    """The same, and the scaler of the loss."""

    scaler: Scaler | None


@dataclass(frozen=True)
class Settings:
    """Checked, and the same for as long as the strategy is at work."""

    observers: tuple[Observer, ...]
    timeout: float | None
    """Seconds; None: what the process group waits for."""
    ranks_per_node: int | None
    nonfinite: Policy
    scaler: Scaler | None
    verify_every: int | None


def settings_of(
    observer: Observer | Iterable[Observer] | None = None,
    timeout: float | timedelta | None = None,
    ranks_per_node: int | None = None,
    nonfinite: str = "skip",
    scaler: Scaler | None = None,
    verify_every: int | None = None,
    **unknown: object,
) -> Settings:
    if unknown:
        known = ", ".join(ScaledOptions.__annotations__)
        raise WrongType(f"there is no option {next(iter(unknown))!r}; use {known}")
    return Settings(
        observers_of(observer),
        checked_timeout(timeout),
        checked_ranks_per_node(ranks_per_node),
        checked_policy(nonfinite),
        checked_scaler(scaler),
        checked_every(verify_every),
    )
