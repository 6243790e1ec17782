"""The link between the ranks, and the work of strategies on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._version import __version__
from ..agree.limits import Limit
from ..core.bucket import Layout, Slot
from ..lane.open import open_lane
from ..plan.curves import SMALL, Curves
from ..plan.echo import work_of
from ..plan.measure_curves import measure_curves
from ..plan.scale import at_rate, of_nodes
from ..telemetry.ledger import Ledger

WIDTH = 1024  # of the matrix that times the strategies
TIMEOUT = 20.0
TOGETHER = "start all ranks at the same time, on idle machines"


@dataclass(frozen=True)
class MeasuredLink:
    curves: Curves
    """Seconds of a collective, by its bytes on the link of a rank, or of a host that several ranks share."""
    work_s: dict[str, float] = field(default_factory=dict)
    """CPU time of this machine per element, by strategy."""

    @property
    def ranks(self) -> int:
        return self.curves.world

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share the link of a host; 1 if all are on one host."""
        return self.curves.per_node

    @property
    def latency_s(self) -> float:
        """Time of an all-reduce of 4 KiB. One of a few bytes takes a shorter way through Gloo than gradients
        do."""
        return self.curves.curve("all_reduce").seconds(SMALL)

    @property
    def bytes_per_s(self) -> float:
        """Bytes that each rank sends, and receives at the same time, in a large all-reduce."""
        return self.curves.curve("all_reduce").bytes_per_s

    @property
    def largest_bytes(self) -> int:
        """On the link, of the largest all-reduce that was measured."""
        return round(self.curves.curve("all_reduce").points[-1][0])

    def at_rate(self, bytes_per_s: float) -> MeasuredLink:
        return replace(self, curves=at_rate(self.curves, bytes_per_s))

    def shared_by(self, ranks: int) -> MeasuredLink:
        """The same link, if ``ranks`` of a host share it."""
        return self if ranks == 1 else replace(self, curves=of_nodes(self.curves, ranks))

    def as_dict(self) -> dict[str, Any]:
        names = ("ranks", "ranks_per_host", "latency_s", "bytes_per_s", "largest_bytes", "work_s")
        return {**{name: getattr(self, name) for name in names}, "curves": self.curves.as_dict()}


def measure(group: Any, device: torch.device, strategies: Sequence[str] = ()) -> MeasuredLink:
    """Call it on all ranks of the group. It takes a few seconds on a link of 20 Mbit/s or more."""
    opened = open_lane(
        group, device, Ledger(), {"version": __version__, "strategies": list(strategies)}, parameters=[],
        limit=Limit(TIMEOUT, TOGETHER), doing="doctor",
    )  # fmt: skip
    try:
        curves = measure_curves(opened, device)
        matrix = Layout([Slot("matrix", torch.Size([WIDTH, WIDTH]))])
        work = {text: work_of(text, [matrix], opened.scopes, device=device) for text in strategies}
    finally:
        opened.lane.close()
    per_element = {text: sum(each.own_s for each in work[text]) / WIDTH**2 for text in strategies}
    return MeasuredLink(curves, per_element)
