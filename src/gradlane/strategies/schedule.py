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
    """``first`` for the steps 0 to ``step`` - 1, ``then`` from ``step`` on."""

    step: int
    then: Strategy
    first: Strategy = field(default_factory=Mean)
    linear: ClassVar[bool] = True
    keeps_privacy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not is_whole(self.step):
            raise WrongType(f"step is a {type(self.step).__name__}; it is a whole number of steps")
        if self.step < 0:
            raise InvalidValue(f"step={self.step} is before the first; use 0 or more")
        for name in ("then", "first"):
            if not isinstance(getattr(self, name), Strategy):
                raise WrongType(f"{name}={getattr(self, name)!r} is not a strategy; write Mean(), say")
        check_nesting(self)

    @property
    def averages(self) -> bool:
        return self.first.averages and self.then.averages

    async def reduce(self, bucket: Bucket) -> Reduced:
        chosen = self.first if bucket.step < self.step else self.then
        return await chosen.reduce(bucket)
