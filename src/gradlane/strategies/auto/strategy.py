"""``Auto``: measures while it trains, and uses the strategy that pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from ...core.bucket import Bucket
from ...core.collectives import all_reduce
from ...core.memory import Memory
from ...core.scopes import Scopes
from ...core.strategy import Reduced, Strategy, named_states, parts
from ...core.streams import has_streams, on_device
from ...core.world_change import Slots
from ...errors import InvalidValue, WrongType
from ..as_strategy import as_strategy
from ..feedback import ErrorFeedback
from ..nesting import check_nesting
from ..text import describe
from .course import Course
from .decisions import as_script
from .ladder import LOSSES, OFF, up_to
from .moments import Clock, DeviceMoment
from .switch import Switch


@dataclass
class Auto(Strategy):
    """Chooses while training runs, and only what pays: it begins as plain DDP, and stays so if nothing gains.

    ``at_most`` says what the machine may lose of a step's gradient: "exact", "bf16", "int8" (the default),
    "int4" or "lossy"; ``among`` names the strategies instead, as objects or texts, the most exact first. The
    plain mean is always allowed. A strategy that promises a gain of 10 % is tried in real steps, in turn with
    the one in use, and adopted if it is faster for certain. Later a change of the link is noticed.

    All ranks decide alike, from figures that they have exchanged. One residual serves all strategies in
    ``ErrorFeedback``; before one without feedback follows, a plain mean sends it. ``attachment.decisions()``
    has all decisions; ``replay`` follows those of another run, and measures nothing.

    In steps of the plain mean DDP does what it does without gradlane: ``nonfinite`` is for steps that a
    strategy reduces. Without a clock (``Simulation``, ``dry_run``) it is the plain mean.
    """

    at_most: str = "int8"
    among: Sequence[Strategy | str] | None = None
    replay: Mapping[int, str] | None = None
    feedback: ErrorFeedback = field(init=False)
    plain: Switch = field(init=False)
    course: Course = field(init=False)
    _clock: Callable[[], float] = field(init=False, default=time.perf_counter, repr=False, compare=False)
    _known: list[str] = field(init=False, default_factory=list, repr=False, compare=False)
    _allowed: list[str] = field(init=False, default_factory=list, repr=False, compare=False)
    keeps_privacy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.at_most not in LOSSES:
            raise InvalidValue(f"at_most={self.at_most!r} is not known; use one of {', '.join(LOSSES)}")
        if self.among is not None and (not isinstance(self.among, list | tuple) or not self.among):
            raise WrongType(f"among={self.among!r} is no list of strategies; write ['Sharded(Int8())']")
        found = {OFF: as_strategy(OFF)}
        if self.among is None:
            found |= {text: as_strategy(text) for text in up_to(self.at_most)}
        else:
            named = [as_strategy(strategy) for strategy in self.among]
            found |= {describe(strategy, short=True): strategy for strategy in named}
            self.among = named
        for text, strategy in found.items():
            _refuse(text, strategy)
        self.feedback = _one_feedback({t: s for t, s in found.items() if isinstance(s, ErrorFeedback)})
        self.plain = Switch({t: s for t, s in found.items() if not isinstance(s, ErrorFeedback)})
        self._known = self._allowed = list(found)
        script = {} if self.replay is None else _checked(as_script(self.replay), found)
        self.replay = None if self.replay is None else script
        self.course = Course({t: isinstance(s, ErrorFeedback) for t, s in found.items()}, script)
        check_nesting(self)

    def refuses_around(self, wrapper: Strategy) -> str | None:
        name = type(wrapper).__name__
        return (
            f"{name}(... Auto(...)): Auto decides for whole steps; write Auto(among=['{name}(...)']) instead"
        )

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Before it is attached: time steps by this clock. For runs that stop between their steps."""
        self._clock = clock

    def clock_on(self, device: torch.device) -> Clock:
        """What times the steps of a model on this device: events of the device, unless a clock was given."""
        given = self._clock is not time.perf_counter
        return partial(DeviceMoment, device) if has_streams(device) and not given else self._clock

    @property
    def allowed(self) -> list[str]:
        """The strategies that may be used here, the most exact first."""
        return list(self._allowed)

    def enter(self, scopes: Scopes, slots: Slots) -> None:
        """One that this world does not suit is left out, unless the user has named it."""
        suited = []
        for text in self._known:
            strategy = self.strategy(text)
            across_nodes = 1 < scopes.sizes.get("node", 1) < scopes.world
            if self.among is None and any(p.uses_nodes for p in parts(strategy)) and not across_nodes:
                continue
            strategy.enter(scopes, slots)
            suited.append(text)
        self._allowed = suited

    def strategy(self, text: str) -> Strategy:
        """The strategy inside that sends, without error feedback."""
        rules = self.plain.rules if text in self.plain.rules else self._lossy.rules
        return rules[text]

    def whole(self, text: str) -> Strategy:
        """The strategy with all that belongs to it, and a residual of its own: for planning."""
        strategy = self.strategy(text)
        if text in self.plain.rules:
            return strategy
        return ErrorFeedback(strategy, self.feedback.dtype, self.feedback.decay)

    @property
    def _lossy(self) -> Switch:
        assert isinstance(self.feedback.inner, Switch)
        return self.feedback.inner

    async def reduce(self, bucket: Bucket) -> Reduced:
        course = self.course
        if bucket.index == 0:
            course.begin(bucket.step)
        if bucket.flat.is_sparse:  # no codec takes it
            reduced = await self.plain.rules[OFF].reduce(bucket)
        elif course.flushes or course.now not in self.plain.rules:
            self._lossy.use(course.now)
            reduced = await self.feedback.reduce(bucket)
        else:
            self.plain.use(course.now)
            reduced = await self.plain.reduce(bucket)
        if bucket.is_last and course.due:
            await self.exchange(bucket)
        return reduced

    async def exchange(self, bucket: Bucket) -> None:
        """The ranks take the largest of their figures; what follows from them all of them decide alike."""
        row = on_device(torch.tensor(self.course.row(), dtype=torch.float64), bucket.flat.device)
        self.course.take((await all_reduce(row, op="max", exact=True)).tolist())


def _checked(script: Mapping[int, str], known: Mapping[str, Strategy]) -> dict[int, str]:
    """The script with the texts by which the strategies are known."""
    found = {
        step: text if text in known else describe(as_strategy(text), short=True)
        for step, text in script.items()
    }
    for text in found.values():
        if text not in known:
            raise InvalidValue(
                f"replay has {text!r}, which is not among {', '.join(known)}; add it to among="
            )
    return found


def _refuse(text: str, strategy: Strategy) -> None:
    inner = strategy.inner if isinstance(strategy, ErrorFeedback) else strategy
    if any(not part.alike for part in parts(strategy)):
        raise InvalidValue(f"Auto cannot use {text}: the ranks would get different gradients; leave it out")
    for leaf in named_states(inner):
        if isinstance(leaf.state, Memory) and not leaf.state.shared:
            raise InvalidValue(
                f"Auto cannot use {text}: {leaf.owner} would keep what it holds while another strategy is in "
                "use; write ErrorFeedback outermost, whose residual all of them share, or attach it alone"
            )


def _one_feedback(strategies: Mapping[str, ErrorFeedback]) -> ErrorFeedback:
    options = {(s.dtype, s.decay) for s in strategies.values()} or {(torch.float32, 1.0)}
    if len(options) > 1:
        raise InvalidValue(
            "the strategies in among= share one residual, and their ErrorFeedback has different options; "
            "write the same dtype and decay in all of them"
        )
    (dtype, decay) = options.pop()
    return ErrorFeedback(Switch({text: s.inner for text, s in strategies.items()}), dtype, decay)
