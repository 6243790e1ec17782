"""Where a rank is in local training, as its checkpoints hold it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ..errors import InvalidValue
from ..feed.rounds import Completed
from ..feed.step import State


@dataclass(frozen=True)
class Position:
    steps: int
    """Of the optimizer."""
    compared: bool
    """The ranks have compared their anchors."""
    apply_at: int
    pending: int | None
    """The fragment of a round that is complete and not yet applied."""
    skipped: bool
    """That round was skipped."""

    @staticmethod
    def read(text: object) -> Position:
        try:
            return Position(**json.loads(str(text)))
        except (ValueError, TypeError) as error:
            raise InvalidValue(
                f"the position in local training is damaged: {error}; use another checkpoint"
            ) from None

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def completed(self) -> Completed | None:
        if self.pending is None:
            return None
        return Completed(self.pending, State.SKIPPED if self.skipped else State.COMMITTED)
