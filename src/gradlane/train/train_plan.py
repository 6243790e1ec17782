"""What ``gradlane train`` trains, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..bench.arms import DDP, check_arm, is_hsdp
from ..bench.emulation import MOST_HOSTS
from ..bench.link import Link
from ..errors import InvalidValue
from .tasks import BATCHES, WIDTHS, check_task, check_width

RATES = {"sgd": 0.1, "adam": 3e-3}  # default learning rates
MOST_SEEDS = 30
TUNING_SEED = MOST_SEEDS  # reported seeds are 0 to 29, so it is never one of them
EVALUATIONS = 20  # per run, besides the one before its first step
LONGEST = 30 * 24 * 3600.0


@dataclass(frozen=True)
class TrainPlan:
    """Options of a run. None, or no learning rate, stands for the default of the task or of the optimizer.

    With several learning rates each arm is tuned.
    """

    task: str = "bytes"
    arms: tuple[str, ...] = ()
    ranks: int = 2
    steps: int = 200
    seeds: int = 1
    link: Link = field(default=Link("none", None))
    optimizer: str = "sgd"
    lr: tuple[float, ...] = ()
    batch: int | None = None
    width: int | None = None
    every: int | None = None
    target: float | None = None
    budget: float = 900.0

    def __post_init__(self) -> None:
        check_task(self.task)
        check_width(self.layer_width)
        if self.steps < 1:
            raise InvalidValue(f"steps={self.steps} trains nothing; use 1 or more")
        if self.ranks < 2:
            raise InvalidValue(f"ranks={self.ranks} has no peer to exchange gradients with; use 2 or more")
        if self.ranks > MOST_HOSTS:
            raise InvalidValue(f"ranks={self.ranks} are too many for one machine; use 2 to {MOST_HOSTS}")
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise InvalidValue(f"seeds={self.seeds} is outside of 1 to {MOST_SEEDS}; use a number between")
        if self.optimizer not in RATES:
            raise InvalidValue(f"optimizer {self.optimizer!r} is not known; use {' or '.join(RATES)}")
        self._check_rates()
        if self.batch_size < 1:
            raise InvalidValue(f"batch={self.batch} holds nothing; use 1 or more")
        if self.interval < 1:
            raise InvalidValue(f"every={self.every} is not a number of steps; use 1 or more")
        if self.target is not None and not math.isfinite(self.target):
            raise InvalidValue(f"target={self.target} is not a loss; use a finite number")
        if not 0 < self.budget <= LONGEST:
            raise InvalidValue(
                f"budget={self.budget:g} is not a time to train; use seconds, above 0 to {LONGEST:g}"
            )
        for arm in self.arms:
            if is_hsdp(arm):
                raise InvalidValue(f"arm {arm!r} is for gradlane bench --nodes; gradlane train has DDP only")
            check_arm(arm)

    def _check_rates(self) -> None:
        for rate in self.lr:
            if not 0 < rate < math.inf:
                raise InvalidValue(
                    f"lr={rate} cannot train; use a number above 0, say {RATES[self.optimizer]}"
                )
            if self.lr.count(rate) > 1:
                named = ",".join(f"{each:g}" for each in self.lr)
                raise InvalidValue(f"lr={named} has {rate:g} twice; name each rate once")

    @property
    def all_arms(self) -> tuple[str, ...]:
        """DDP without a hook first: every other arm is compared with it. No arm appears twice."""
        return tuple(dict.fromkeys((DDP, *self.arms)))

    @property
    def rates(self) -> tuple[float, ...]:
        """One, or several from the lowest to the highest."""
        return tuple(sorted(self.lr)) or (RATES[self.optimizer],)

    @property
    def tuned_rates(self) -> tuple[float, ...]:
        """The grid that every arm tries before its seeds; empty if there is one rate only."""
        return self.rates if len(self.rates) > 1 else ()

    @property
    def batch_size(self) -> int:
        return BATCHES[self.task] if self.batch is None else self.batch

    @property
    def layer_width(self) -> int:
        return WIDTHS[self.task] if self.width is None else self.width

    @property
    def interval(self) -> int:
        return max(1, self.steps // EVALUATIONS) if self.every is None else self.every
