"""Which strategy reduces which step: a state that is equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Literal
from zlib import crc32

from ...core.world_change import Shared
from ...errors import InvalidValue, RanksDisagree
from ...log import log
from .decisions import Decision, as_state, from_state
from .ladder import OFF
from .moments import Clock, Moment
from .trial import Block, Blocks

Ended = Literal["kept", "skipped", "undone"]


class Course(Shared):
    """The strategy of every step: by a script of decisions, by a tuner, or always the plain mean.

    A block of a tuner has up to three kinds of steps: one that is not timed, because the strategy changed
    before it; the timed ones; and one more, in which the ranks exchange what the timed ones took (``due``).
    The tuner learns of it before the next step, unless the step failed: then the next one exchanges again.
    """

    undoable = False

    def __init__(self, with_residual: Mapping[str, bool], script: Mapping[int, str]) -> None:
        self.now = OFF
        """The strategy of this step."""
        self.flushes = False
        """In this step the plain mean sends the residual too: the strategy takes none."""
        self.decisions: list[Decision] = []
        self._with_residual = with_residual
        self._script = script
        self._holds_residual = False
        self._step = -1
        self._ended: Ended | None = None
        self._before = (0, OFF, False, False)  # decisions, strategy and residual before this step
        self._answer: float | None = None  # to the current block
        self._blocks: Blocks | None = None
        self._clock: Clock = _no_clock
        self._block = Block(OFF)
        self._untimed = 0  # steps at the begin of the block
        self._place = -1  # of this step in the block
        self._stamps: list[Moment] = []  # of the begin of each step of the block, from the first timed one on

    def start(self, blocks: Blocks, clock: Clock, step: int) -> None:
        """Let a tuner decide from this step on."""
        self._blocks, self._clock, self._answer = blocks, clock, None
        self._enter(next(blocks), step)

    @property
    def is_scripted(self) -> bool:
        return bool(self._script)

    @property
    def is_tuned(self) -> bool:
        return self._blocks is not None

    @property
    def needs_lane(self) -> bool:
        """Whether the next step is none of DDP's own, as far as is known before it begins."""
        return self.now != OFF or self._holds_residual

    @property
    def due(self) -> bool:
        """Whether the ranks exchange their figures in this step."""
        return self._blocks is not None and self._place == self._untimed + self._block.timed

    @property
    def is_plain(self) -> bool:
        """Whether plain DDP does the same in this step."""
        return self.now == OFF and not self.flushes

    def begin(self, step: int) -> None:
        """Before the first bucket of a step. Twice is fine."""
        if step == self._step:
            return
        self._conclude()
        self._step, self._ended = step, None
        self._before = (len(self.decisions), self.now, self._holds_residual, self.flushes)
        if self._script:
            self._follow(step)
        elif self._blocks is not None:
            self._advance(step)
        uses_residual = self._with_residual[self.now]
        self.flushes = self._holds_residual and not uses_residual
        self._holds_residual = self._holds_residual or uses_residual

    def row(self) -> list[float]:
        """What this rank exchanges: the ranks take the largest of each."""
        seconds = median(after - before for before, after in pairwise(self._stamps))
        digest = float(crc32(repr(self.decisions).encode()))
        return [seconds, digest, -digest]

    def take(self, row: Sequence[float]) -> None:
        seconds, most, least = row
        if most != -least:
            raise RanksDisagree(
                f"step {self._step}: the ranks have decided differently, so they would wait for each other; "
                "begin again from a checkpoint, or attach a strategy instead of Auto"
            )
        self._answer = seconds

    def keep(self) -> None:
        self._ended = "kept"

    def skip(self) -> None:
        """What the step took counts, although the residual is as before it."""
        self._ended = "skipped"
        self._holds_residual = self._before[2]

    def undo(self) -> None:
        """A tuner has decided before the step, from what earlier ones took; that stays."""
        self._ended, self._step, self._answer = "undone", -1, None
        count, now, self._holds_residual, flushes = self._before
        if self._blocks is None:
            self.now, self.flushes = now, flushes
            del self.decisions[count:]

    def _conclude(self) -> None:
        """The last step is over. A driver that cannot undo tells nothing: then it counts."""
        ended = self._ended or ("undone" if self.undoable and not self.is_plain else "kept")
        if ended == "kept" and self.flushes:
            self._holds_residual = False
        elif ended == "undone":
            self._answer = None

    def _follow(self, step: int) -> None:
        since = max((begin for begin in self._script if begin <= step), default=None)
        strategy = OFF if since is None else self._script[since]
        if strategy != self.now:
            self._decide(Decision(step, strategy, "as in the script"))

    def _advance(self, step: int) -> None:
        assert self._blocks is not None
        if self._answer is not None:
            answer, self._answer = self._answer, None
            self._enter(self._blocks.send(answer), step)
        if self._place < self._untimed + self._block.timed:
            self._place += 1
            if self._place >= self._untimed:
                self._stamps.append(self._clock())

    def _enter(self, block: Block, step: int) -> None:
        changed = block.strategy != self.now
        if changed or block.decided:
            self._decide(Decision(step, block.strategy, block.why))
        if block.decided:
            log.info("Auto, step %d: %s", step, block.why)
        self._block, self._untimed, self._place, self._stamps = block, int(changed), -1, []

    def _decide(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self.now = decision.strategy

    def state_dict(self) -> dict[str, Any]:
        if not self.decisions and not self._holds_residual:
            return {}
        return {
            "decisions": as_state(self.decisions),
            "now": self.now,
            "holds_residual": self._holds_residual,
            "flushes": self.flushes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A tuner that is at work begins anew: the machine may be another one."""
        now = state.get("now", OFF)
        if now not in self._with_residual:
            known = ", ".join(self._with_residual)
            raise InvalidValue(f"the state is one of {now!r}, this Auto chooses among {known}")
        self.decisions = from_state(state.get("decisions", {}))
        self.now, self.flushes = now, bool(state.get("flushes", False))
        self._holds_residual = bool(state.get("holds_residual", False))
        self._step, self._ended, self._blocks, self._answer = -1, "kept", None, None

    def __deepcopy__(self, memo: object) -> Course:
        copied = Course(self._with_residual, self._script)
        copied.load_state_dict(self.state_dict())
        return copied

    def __reduce__(self) -> Any:
        return _unpickled, (dict(self._with_residual), dict(self._script), self.state_dict())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Course)  # state does not count in comparisons

    __hash__ = None  # type: ignore[assignment]


def _unpickled(with_residual: Mapping[str, bool], script: Mapping[int, str], state: Any) -> Course:
    course = Course(with_residual, script)
    course.load_state_dict(state)
    return course


def _no_clock() -> float:
    raise AssertionError("a course without a tuner has no clock")
