"""One root error and its few children.

Each child is also the built-in error a caller would expect, so that plain ``except ValueError``
keeps working. Every message names the value, the limit and the way out.
"""

from __future__ import annotations


class GradlaneError(Exception):
    """Root of every error that gradlane raises by itself."""


class InvalidValue(GradlaneError, ValueError):
    """A value outside its limits: an option, a name in a text form, a damaged state."""


class WrongType(GradlaneError, TypeError):
    """Something of another kind than what is asked for: no DDP model, no strategy, no request."""


class WrongState(GradlaneError, RuntimeError):
    """A call at the wrong time: before ``init_process_group``, twice, after ``close``."""


class NotSaved(GradlaneError, OSError):
    """A rank could not write its part of a checkpoint; the one that was there before is as it was."""


class RanksDisagree(GradlaneError, RuntimeError):
    """Ranks differ in something that must agree, or ask for different collectives."""


class NonFinite(GradlaneError, ArithmeticError):
    """A mean gradient has NaN or infinity in it; raised on all ranks, memory as before the step."""


class PeerFailed(GradlaneError, RuntimeError):
    """Another rank raised in this step; ``rank`` is the one that did."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLost(PeerFailed):
    """Another rank is gone or did not answer within the time-out."""
