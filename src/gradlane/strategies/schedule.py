"""One strategy first, another later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.bucket import Bucket
from ..core.numbers import is_whole
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, WrongType
from .mean import Mean
from .nesting import check_nesting


@dataclass
class After(Strategy):
    """``first`` for the steps 0 to ``step`` - 1, ``then`` from ``step`` on.

    With ``refresh=k`` it is ``first`` again in the steps in which 0/1 Adam refreshes its second moment (Lu et
    al., 2022): k steps at a distance of 1, k at a distance of 2, k at a distance of 4, and so on from step 0.
    The paper has k = 16.
    """

    step: int
    then: Strategy
    first: Strategy = field(default_factory=Mean)
    refresh: int | None = None
    linear: ClassVar[bool] = True
    keeps_privacy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not is_whole(self.step):
            raise WrongType(f"step is a {type(self.step).__name__}; it is a whole number of steps")
        if self.step < 0:
            raise InvalidValue(f"step={self.step} is before the first; use 0 or more")
        if self.refresh is not None and (not is_whole(self.refresh) or self.refresh < 1):
            raise InvalidValue(
                f"refresh={self.refresh!r} is not possible; use a whole number from 1 up, or None"
            )
        for name in ("then", "first"):
            if not isinstance(getattr(self, name), Strategy):
                raise WrongType(f"{name}={getattr(self, name)!r} is not a strategy; write Mean(), say")
        check_nesting(self)

    @property
    def averages(self) -> bool:
        return self.first.averages and self.then.averages

    async def reduce(self, bucket: Bucket) -> Reduced:
        return await (self.first if self.is_first(bucket.step) else self.then).reduce(bucket)

    def is_first(self, step: int) -> bool:
        return step < self.step or is_refresh(step, self.refresh)


def is_refresh(step: int, refresh: int | None) -> bool:
    """Whether 0/1 Adam refreshes in this step: distances double after every ``refresh`` of them."""
    if refresh is None:
        return False
    doublings = (step // refresh + 1).bit_length() - 1
    distance = 1 << doublings
    return (step - refresh * (distance - 1)) % distance == 0
