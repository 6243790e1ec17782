"""What ``attach`` and ``Reducer`` both take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from .lane.drift import checked_every
from .lane.guard import Policy, checked_policy
from .lane.limits import checked_ranks_per_node, checked_timeout
from .lane.scaled import Scaler, checked_scaler
from .report.sink import Observer, observers_of


@dataclass(frozen=True)
class Settings:
    """Checked, and the same for as long as the strategy is at work; ``attach`` says what each is."""

    observers: tuple[Observer, ...]
    timeout: float
    ranks_per_node: int | None
    nonfinite: Policy
    scaler: Scaler | None
    verify_every: int | None


def settings_of(
    observer: Observer | Iterable[Observer] | None,
    timeout: float | timedelta,
    ranks_per_node: int | None,
    nonfinite: str,
    scaler: Scaler | None,
    verify_every: int | None,
) -> Settings:
    return Settings(
        observers_of(observer),
        checked_timeout(timeout),
        checked_ranks_per_node(ranks_per_node),
        checked_policy(nonfinite),
        checked_scaler(scaler),
        checked_every(verify_every),
    )
