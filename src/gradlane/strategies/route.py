"""Different strategies for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..core.bucket import Bucket, Layout, Slot, as_layout
from ..core.strategy import Reduced, Strategy
from ..errors import WrongType
from .mean import Mean
from .private import refuse_private_inside

OTHERWISE = ""


@dataclass
class Route(Strategy):
    """The first pattern that matches a parameter's name chooses its strategy, else ``otherwise``.

    Patterns are shell-like: ``Route({"embed.*": Mean(), "*.bias": Mean()}, otherwise=...)``. The
    parts of a bucket go one after the other, in the order of the patterns, ``otherwise`` last. Patterns that
    lead to one and the same strategy (the object, not its like) are one part: it sees all they match at once.
    """

    rules: Mapping[str, Strategy]
    otherwise: Strategy = field(default_factory=Mean)
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise WrongType(
                f"rules is a {type(self.rules).__name__}; write Route({{'embed.*': Mean()}}, ...)"
            )
        for pattern, strategy in {**self.rules, "otherwise": self.otherwise}.items():
            if not isinstance(pattern, str) or not isinstance(strategy, Strategy):
                raise WrongType(
                    f"{pattern!r} leads to a {type(strategy).__name__}; a route leads from a name "
                    "pattern to a strategy"
                )
        refuse_private_inside("Route", *self.rules.values(), self.otherwise)

    @property
    def averages(self) -> bool:
        return all(strategy.averages for strategy in (*self.rules.values(), self.otherwise))

    async def reduce(self, bucket: Bucket) -> Reduced:
        shares = _shares(self._leading(), as_layout(bucket.layout))
        if len(shares) == 1:  # the usual case, and the only one for a sparse gradient
            return await self._strategy(next(iter(shares))).reduce(bucket)
        gave_sent: list[tuple[list[slice], Callable[[], Tensor] | None, Tensor]] = []
        bounded = True
        for pattern, (places, layout) in shares.items():
            part = replace(bucket, flat=_gathered(bucket.flat, places), layout=layout)
            mine = part.flat.clone() if bucket.feedback else part.flat
            reduced = await self._strategy(pattern).reduce(part)
            _scattered(reduced.mean, places, into=bucket.flat)
            gave_sent.append((places, reduced.sent, mine))
            bounded = bounded and reduced.bounded
        if not any(sent for _, sent, _ in gave_sent):
            return Reduced(bucket.flat, bounded=bounded)

        def sent() -> Tensor:
            whole = torch.empty_like(bucket.flat)
            for places, part_sent, mine in gave_sent:
                _scattered(part_sent() if part_sent else mine, places, into=whole)
            return whole

        return Reduced(bucket.flat, sent, bounded)

    def _leading(self) -> tuple[tuple[str, str], ...]:
        """Each pattern, and the first that has the same strategy."""
        firsts: dict[int, str] = {}
        return tuple(
            (pattern, firsts.setdefault(id(strategy), pattern))
            for pattern, strategy in {**self.rules, OTHERWISE: self.otherwise}.items()
        )

    def _strategy(self, pattern: str) -> Strategy:
        return self.otherwise if pattern == OTHERWISE else self.rules[pattern]

    def unmatched(self, names: tuple[str, ...]) -> list[str]:
        """Patterns that no parameter has: most likely a slip of the pen."""
        return [p for p in self.rules if not any(fnmatchcase(name, p) for name in names)]


Shares = dict[str, tuple[list[slice], Layout]]


@lru_cache(maxsize=1024)
def _shares(leading: tuple[tuple[str, str], ...], layout: Layout) -> Shares:
    """Which places of the flat gradient belong to which leading pattern; neighbours are joined."""
    leaders = dict(leading)
    places: dict[str, list[slice]] = {leader: [] for leader in leaders.values()}
    slots: dict[str, list[Slot]] = {leader: [] for leader in leaders.values()}
    start = 0
    for slot in layout:
        chosen = leaders[next((p for p in leaders if fnmatchcase(slot.name, p)), OTHERWISE)]
        own, stop = places[chosen], start + slot.numel
        if own and own[-1].stop == start:
            own[-1] = slice(own[-1].start, stop)
        else:
            own.append(slice(start, stop))
        slots[chosen].append(slot)
        start = stop
    return {leader: (places[leader], Layout(found)) for leader, found in slots.items() if found}


def _gathered(flat: Tensor, places: list[slice]) -> Tensor:
    """A view where the places are one run, else a copy."""
    if len(places) == 1:
        return flat[places[0]]
    return torch.cat([flat[place] for place in places])


def _scattered(part: Tensor, places: list[slice], *, into: Tensor) -> None:
    start = 0
    for place in places:
        size = place.stop - place.start
        into[place].copy_(part[start : start + size])
        start += size
