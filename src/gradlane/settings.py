"""The options that ``attach``, ``reduce_gradients`` and every integration take. ``attach`` explains them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

from .agree.limits import checked_ranks_per_node, checked_timeout
from .errors import WrongType
from .feed.drift import checked_every
from .feed.loss_scale import Scaler, checked_scaler
from .feed.nonfinite import Policy, checked_policy
from .telemetry.sink import Observer, observers_of

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


class Options(TypedDict, total=False):
    """The ``**options`` of an integration whose framework has its own scaler of the loss."""

    observer: Observer | Iterable[Observer] | None
    timeout: float | timedelta | None
    ranks_per_node: int | None
    nonfinite: Policy
    verify_every: int | None


class ScaledOptions(Options, total=False):
    """The ``**options`` of all others."""

    scaler: Scaler | None


class Settings:
    """The checked options of one session, with the defaults."""

    def __init__(self, **options: Unpack[ScaledOptions]) -> None:
        if unknown := [name for name in options if name not in ScaledOptions.__annotations__]:
            known = ", ".join(ScaledOptions.__annotations__)
            raise WrongType(f"there is no option {unknown[0]!r}; use {known}")
        self.observers = observers_of(options.get("observer"))
        self.timeout = checked_timeout(options.get("timeout"))
        """Seconds; None for the timeout of the process group."""
        self.ranks_per_node = checked_ranks_per_node(options.get("ranks_per_node"))
        self.nonfinite = checked_policy(options.get("nonfinite", "skip"))
        self.verify_every = checked_every(options.get("verify_every"))
        self.scaler = checked_scaler(options.get("scaler"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
