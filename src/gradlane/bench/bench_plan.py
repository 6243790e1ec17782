"""What ``gradlane bench`` measures, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..strategies.auto.strategy import Auto
from .arms import COMPUTE, DDP, check_arm, is_hsdp
from .hsdp import check_hsdp, has_hierarchical
from .link import Link
from .nodes import MOST_RANKS, Nodes


@dataclass(frozen=True)
class BenchPlan:
    arms: Sequence[str]
    links: Sequence[Link]
    ranks: Sequence[int] = (2,)
    model: str = "mlp9m"
    bucket_mb: float | None = None
    steps: int = 20
    warmup: int = 4  # DDP rebuilds its buckets after the first; torch's PowerSGD starts in the third
    budget_s: float = 900.0
    timeout_s: float | None = None
    """For one step of one arm."""
    in_a_row: int = 1
    """Steps that an arm takes before the next one. Of several the first is not counted: the other arms have
    used the caches."""
    nodes: Nodes | None = None
    """In place of ``ranks``: nodes of several ranks. None: each rank has its own host."""

    def __post_init__(self) -> None:
        for arm in self.arms:
            self._check(arm, check_arm(arm))
        for ranks in self.ranks:
            if not 2 <= ranks <= MOST_RANKS:
                raise InvalidValue(f"ranks={ranks} cannot be compared; use 2 to {MOST_RANKS}")
        if self.steps < 1:
            raise InvalidValue(f"steps={self.steps} measures nothing; use 1 or more")
        if self.warmup < 1:
            raise InvalidValue(
                f"warmup={self.warmup}: the first step of DDP differs from the others; use 1 or more"
            )
        if self.in_a_row < 1:
            raise InvalidValue(f"in_a_row={self.in_a_row} is no number of steps; use 1 or more")
        for name in ("budget_s", "bucket_mb", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"{name}={value:g} is not above 0")

    def _check(self, arm: str, strategy: Strategy | None) -> None:
        if isinstance(strategy, Auto):
            raise InvalidValue(
                f"arm {arm!r} decides over some hundred steps, and a bench takes {self.steps}; use "
                "`gradlane train` with this arm, or `gradlane plan`"
            )
        if is_hsdp(arm):
            check_hsdp(arm, strategy, self.nodes)
        elif self.nodes is None and strategy is not None and has_hierarchical(strategy):
            raise InvalidValue(
                f"arm {arm!r} is for nodes of several ranks, and each rank has its own host here; "
                "add --nodes 2 --per-node 2"
            )

    @property
    def all_arms(self) -> tuple[str, ...]:
        """With DDP, the baseline of all speed-ups, and ``Noop()``, which shows the time of compute alone."""
        return tuple(dict.fromkeys((DDP, COMPUTE, *self.arms)))

    @property
    def worlds(self) -> tuple[int, ...]:
        """The numbers of ranks to measure with."""
        return tuple(self.ranks) if self.nodes is None else (self.nodes.ranks,)

    @property
    def settings(self) -> int:
        """How many combinations of link and number of ranks there are."""
        return len(self.links) * len(self.worlds)

    @property
    def total_steps(self) -> int:
        """Steps of all arms in all settings."""
        return self.settings * len(self.all_arms) * (self.warmup + self.steps)
