"""Different strategies for different parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..core.bucket import Bucket, Layout, Slot, as_layout
from ..core.strategy import Reduced, Strategy, parts
from ..errors import WrongType
from ..log import log
from .mean import Mean
from .nesting import check_nesting

OTHERWISE = ""


@dataclass
class Route(Strategy):
    """The first pattern that matches a parameter's name chooses its strategy, else ``otherwise``.

    Patterns are shell-like: ``Route({"embed.*": Mean(), "*.bias": Mean()}, otherwise=...)``. The parts of a
    bucket go one after the other, in the order of the patterns, ``otherwise`` last. Patterns that lead to the
    same strategy object are one part: the strategy sees all that they match at once. (Two equal objects stay
    two parts: each may have a state.)
    """

    rules: Mapping[str, Strategy]
    otherwise: Strategy = field(default_factory=Mean)
    linear: ClassVar[bool] = True
    keeps_privacy: ClassVar[bool] = False

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
        check_nesting(self)

    @property
    def averages(self) -> bool:
        return all(strategy.averages for strategy in (*self.rules.values(), self.otherwise))

    async def reduce(self, bucket: Bucket) -> Reduced:
        routed = _routed(self._first_patterns(), as_layout(bucket.layout))
        if len(routed) == 1:  # the usual case, and the only one for a sparse gradient
            return await self._strategy(next(iter(routed))).reduce(bucket)
        answers: list[tuple[list[slice], Callable[[], Tensor] | None, Tensor]] = []
        bounded = True
        for pattern, (slices, layout) in routed.items():
            part = replace(bucket, flat=_gathered(bucket.flat, slices), layout=layout)
            gradient = part.flat.clone() if bucket.wants_sent else part.flat
            reduced = await self._strategy(pattern).reduce(part)
            _scatter(reduced.mean, slices, into=bucket.flat)
            answers.append((slices, reduced.sent, gradient))
            bounded = bounded and reduced.bounded
        if not any(sent for _, sent, _ in answers):
            return Reduced(bucket.flat, bounded=bounded)

        def sent() -> Tensor:
            out = torch.empty_like(bucket.flat)
            for slices, part_sent, gradient in answers:
                _scatter(part_sent() if part_sent else gradient, slices, into=out)
            return out

        return Reduced(bucket.flat, sent, bounded)

    def _first_patterns(self) -> tuple[tuple[str, str], ...]:
        """Each pattern, and the first pattern that has the same strategy."""
        firsts: dict[int, str] = {}
        return tuple(
            (pattern, firsts.setdefault(id(strategy), pattern))
            for pattern, strategy in {**self.rules, OTHERWISE: self.otherwise}.items()
        )

    def _strategy(self, pattern: str) -> Strategy:
        return self.otherwise if pattern == OTHERWISE else self.rules[pattern]

    def unmatched(self, names: tuple[str, ...]) -> list[str]:
        """Patterns that match no parameter: most likely a typing mistake."""
        return [p for p in self.rules if not any(fnmatchcase(name, p) for name in names)]


def warn_of_unmatched(strategy: Strategy, names: Iterable[str]) -> None:
    """Log the patterns of every ``Route`` in a strategy that match none of the model's parameters."""
    names = tuple(names)
    for part in parts(strategy):
        if isinstance(part, Route) and (unmatched := part.unmatched(names)):
            log.warning("Route: no parameter matches %s", ", ".join(map(repr, unmatched)))


Routed = dict[str, tuple[list[slice], Layout]]
"""By first pattern: where its parameters lie in the flat gradient, and which they are."""


@lru_cache(maxsize=1024)
def _routed(first_patterns: tuple[tuple[str, str], ...], layout: Layout) -> Routed:
    """Neighbouring parameters of one part are joined to one slice."""
    first = dict(first_patterns)
    slices: dict[str, list[slice]] = {pattern: [] for pattern in first.values()}
    slots: dict[str, list[Slot]] = {pattern: [] for pattern in first.values()}
    start = 0
    for slot in layout:
        chosen = first[next((p for p in first if fnmatchcase(slot.parameter, p)), OTHERWISE)]
        own, stop = slices[chosen], start + slot.numel
        if own and own[-1].stop == start:
            own[-1] = slice(own[-1].start, stop)
        else:
            own.append(slice(start, stop))
        slots[chosen].append(slot)
        start = stop
    return {pattern: (slices[pattern], Layout(found)) for pattern, found in slots.items() if found}


def _gathered(flat: Tensor, slices: list[slice]) -> Tensor:
    """A view where there is one slice, else a copy."""
    if len(slices) == 1:
        return flat[slices[0]]
    return torch.cat([flat[where] for where in slices])


def _scatter(part: Tensor, slices: list[slice], *, into: Tensor) -> None:
    start = 0
    for where in slices:
        size = where.stop - where.start
        into[where].copy_(part[start : start + size])
        start += size
