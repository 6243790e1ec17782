"""One of several strategies, all of which share the residual of one ``ErrorFeedback``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.bucket import Bucket
from ...core.strategy import Reduced, Strategy
from ..mean import Mean


@dataclass
class Switch(Strategy):
    """``ErrorFeedback`` around it gives all of them the same memory; into the plain mean it is sent whole."""

    rules: Mapping[str, Strategy]
    otherwise: Mean = field(default_factory=Mean)
    _now: Strategy | None = field(init=False, default=None, repr=False, compare=False)

    def use(self, text: str) -> None:
        self._now = self.rules.get(text, self.otherwise)

    @property
    def now(self) -> Strategy:
        return self._now or self.otherwise

    @property
    def fuses_feedback(self) -> bool:  # type: ignore[override]
        return self.now.fuses_feedback

    async def reduce(self, bucket: Bucket) -> Reduced:
        return await self.now.reduce(bucket)
