"""The errors: one base class and a few subclasses.

Each subclass is also the built-in error a caller would expect, so that plain ``except ValueError``
keeps working. Every message names the value, the limit and the way out.
"""

from __future__ import annotations


class GradlaneError(Exception):
    """Base class of every error that gradlane raises itself."""


class InvalidValue(GradlaneError, ValueError):
    """A value outside its limits: an option, a name in a text form, a damaged state."""


class WrongType(GradlaneError, TypeError):
    """An argument or an answer of the wrong type: not a DDP model, not a strategy, not a request."""


class WrongState(GradlaneError, RuntimeError):
    """A call at the wrong time: before ``init_process_group``, twice, after ``close``."""


class NotSaved(GradlaneError, OSError):
    """A rank could not write its part of a checkpoint; the previous checkpoint is unchanged."""


class RanksDisagree(GradlaneError, RuntimeError):
    """Ranks differ in something that must be the same, or request different collectives."""


class NonFinite(GradlaneError, ArithmeticError):
    """A mean gradient has NaN or infinity in it. Raised on all ranks; memory is as before the step."""


class PeerFailed(GradlaneError, RuntimeError):
    """Another rank raised in this step; ``rank`` is the one that did."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLost(PeerFailed):
    """Another rank has ended, or did not answer within the timeout."""
