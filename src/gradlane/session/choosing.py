"""``Auto`` at work: a tuner for its course, from what the ranks have measured together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel

from ..core.bucket import Bucket, Layout, Slot
from ..core.scopes import Scopes
from ..core.strategy import Reduced, Strategy
from ..feed.backward_watch import BackwardWatch
from ..feed.step import Step
from ..lane.open import Opened
from ..lane.outside_steps import perform_now
from ..log import log
from ..plan.beat import Beat, beat_from, typical_beat
from ..plan.ddp_buckets import ddp_buckets
from ..plan.echo import bytes_alone, work_of
from ..plan.measure_curves import measure_curves
from ..plan.outlook import Outlook
from ..plan.watched import Watched, beats_of, periods_of
from ..plan.work import dense_work
from ..plan.works import Works, slowest_works, works_as_dict, works_from
from ..strategies.auto.decisions import Decision
from ..strategies.auto.ladder import OFF
from ..strategies.auto.strategy import Auto
from ..strategies.auto.tuner import PROMISING, nothing_known, tune
from ..telemetry.ledger import Ledger
from .cores import cores_of_a_rank

WARMUP, SEEN = 3, 6  # steps: DDP rebuilds its buckets in the second one


def decisions_of(strategy: Strategy) -> list[Decision]:
    """What ``Auto`` has decided; nothing for any other strategy."""
    return list(strategy.course.decisions) if isinstance(strategy, Auto) else []


def figures_of(strategy: Strategy) -> dict[str, float]:
    """For the metrics."""
    if not isinstance(strategy, Auto):
        return {}
    course = strategy.course
    rung = strategy.allowed.index(course.now) if course.now in strategy.allowed else -1
    return {"comm/auto/decisions": len(course.decisions), "comm/auto/rung": rung}


def is_tunable(auto: Auto, scopes: Scopes) -> bool:
    return scopes.world > 1 and not auto.course.is_scripted


def tune_by_trials(strategy: Strategy, scopes: Scopes, step: int, device: torch.device) -> None:
    """Where no step was watched: after ``swap`` or ``load``, without DDP, on other devices than the CPU."""
    if isinstance(strategy, Auto) and not strategy.course.is_tuned and is_tunable(strategy, scopes):
        blocks = tune(strategy.allowed, nothing_known, strategy.course.now)
        strategy.course.start(blocks, strategy.clock_on(device), step)


def exchange_now(opened: Opened, auto: Auto, step: int, device: torch.device) -> None:
    """At the end of a block in which DDP itself reduces the gradients. Collective."""
    perform_now(opened.lane, opened.scopes, _Exchange(auto), torch.zeros(1, device=device), step)


class _Exchange(Strategy):
    def __init__(self, auto: Auto) -> None:
        self._auto = auto

    async def reduce(self, bucket: Bucket) -> Reduced:
        await self._auto.exchange(bucket)
        return Reduced(bucket.flat)


class Choosing:
    """Plain DDP without a hook, watched: until a strategy promises to pay, and then ``needs_hook`` is called.

    The first steps tell when the gradients become ready. With the curves of the link, and with the time that
    each strategy takes for its own work, they tell what a step would take. After that one parameter is
    watched, so that a change of the link is noticed.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        auto: Auto,
        step: Step,
        opened: Opened,
        ledger: Ledger,
        *,
        passed: Callable[[int], None],
        needs_hook: Callable[[], None],
    ) -> None:
        """``passed`` counts a step of DDP with so many bytes of gradients."""
        self._auto, self._step, self._opened = auto, step, opened
        self._passed, self._needs_hook = passed, needs_hook
        self._steps: list[Watched] = []
        self._slots = {name: Slot(name, p.shape) for name, p in ddp.module.named_parameters()}
        self._cap = None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
        self._dtype = next(ddp.module.parameters()).dtype
        self._bytes = 0  # of a step's gradients
        self._device = ddp.device
        with ledger.paused():
            self._curves = measure_curves(opened, ddp.device)
        self._watch = BackwardWatch(ddp, self._backward_ended, auto.clock)
        self._watching = True

    def stop(self) -> None:
        self._watching = False
        self._watch.stop()

    def _backward_ended(self, watch: BackwardWatch) -> None:
        course = self._auto.course
        if course.is_tuned and course.due:
            exchange_now(self._opened, self._auto, self._step.next, self._device)
        elif not course.is_tuned:
            self._bytes = sum(self._slots[name].numel for name, _ in watch.ready) * self._dtype.itemsize
        number = self._step.next
        self._passed(self._bytes)
        if (error := self._step.drift_of(number)) is not None:
            raise error
        if not course.is_tuned:
            self._steps.append(Watched(dict(watch.ready), self._auto.clock(), time.process_time()))
            if len(self._steps) > WARMUP + SEEN:
                self._decide(list(self._steps[-1].ready))
                watch.only_first()
        if course.is_tuned:
            course.begin(self._step.next)
            self.hook_if_needed()

    def loaded(self) -> None:
        """The state may be one of a strategy at work. If it is not, watch anew: the tuner begins anew too."""
        self.hook_if_needed()
        if self._watching:
            self._steps.clear()
            self._watch.all_parameters()

    def hook_if_needed(self) -> None:
        if self._auto.course.needs_lane:
            self.end()

    def end(self) -> None:
        """From now on a strategy gets the gradients."""
        if self._watching:
            self.stop()
            self._needs_hook()

    def _decide(self, order: list[str]) -> None:
        """All ranks decide from the figures of the slowest one, with the buckets of rank 0, as DDP does."""
        _, notes = self._opened.board.agree("auto order", {"order": order}, doing="Auto")
        slots = [self._slots[name] for name in reversed(notes[0]["order"])]
        layouts = ddp_buckets(slots, self._dtype.itemsize, self._cap)
        beat = typical_beat(beats_of(self._steps[-SEEN - 1 :], layouts))
        note = {"beat": asdict(beat), "seconds": median(periods_of(self._steps[-SEEN - 1 :]))}
        _, notes = self._opened.board.agree("auto beat", note, doing="Auto")
        found = [beat_from(note["beat"]) for note in notes]
        seconds = max(note["seconds"] for note in notes)
        outlook = self._outlook(max(found, key=lambda beat: beat.compute), layouts, seconds)
        self._tell(outlook(OFF, seconds), seconds)
        blocks = tune(self._auto.allowed, outlook, OFF, seconds)
        self._auto.course.start(blocks, self._auto.clock, self._step.next)

    def _outlook(self, beat: Beat, layouts: list[Layout], seconds: float) -> Outlook:
        """Only strategies that would pay if their own work took no time are timed."""
        dense = dense_work([self._dtype.itemsize * sum(slot.numel for slot in layout) for layout in layouts])
        scopes, board = self._opened.scopes, self._opened.board
        cores = cores_of_a_rank(board)
        strategies = {text: self._auto.whole(text) for text in self._auto.allowed if text != OFF}
        alone = {t: bytes_alone(s, layouts, scopes, self._dtype) for t, s in strategies.items()}
        hopes = Outlook(beat, {OFF: dense, **alone}, self._curves, cores, OFF)(OFF, seconds)
        own: Works = {
            text: work_of(strategy, layouts, scopes, self._dtype)
            for text, strategy in strategies.items()
            if hopes[text] * PROMISING <= seconds
        }
        _, notes = board.agree("auto work", {"works": works_as_dict(own)}, doing="Auto")
        slowest = slowest_works([works_from(note["works"]) for note in notes])
        return Outlook(beat, {OFF: dense, **slowest}, self._curves, cores, OFF)

    def _tell(self, found: dict[str, float], seconds: float) -> None:
        shown = ", ".join(f"{text} {found[text] * 1e3:.3g} ms" for text in found if text != OFF)
        log.info("Auto: a step of DDP takes %.3g ms; forecasts: %s", seconds * 1e3, shown or "nothing pays")
        if min(found.values()) * PROMISING > seconds:
            log.info("Auto: DDP stays as it is, because no strategy promises a gain of 10 %%")
