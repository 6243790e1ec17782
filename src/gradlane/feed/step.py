"""A step: its states, and the way of its buckets to the lane.

Both feeds, DDP's and that of a loop without DDP, call ``begin``, ``submit`` for each bucket, ``wait`` and
``end``, in this order. README.md has the picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Layout
from ..core.events import StepTimes, wire_bytes
from ..core.scopes import Scopes
from ..core.scratch import Scratch
from ..core.strategy import Reduced, Strategy
from ..errors import GradlaneError, NonFinite, WrongState
from ..lane.base import Book, Finish, Lane, same
from .drift import DriftCheck
from .loss_scale import Scaler, unscaled
from .nonfinite import NonFinitePolicy
from .resumed_buckets import ResumedBuckets


class State(Enum):
    IDLE = "no step has begun yet"
    BEGUN = "the first bucket is here, and more will come"
    SUBMITTED = "the lane has all buckets"
    COMPUTED = "backward is over, and the lane is done"
    COMMITTED = "the mean is finite; what the strategy remembers is kept"
    SKIPPED = "the mean is not finite; memory is as before, and optimizers get no gradients"
    FAILED = "a rank raised or was lost, or backward stopped; memory is as before"


OVER = frozenset({State.IDLE, State.COMMITTED, State.SKIPPED, State.FAILED})

NEXT: dict[State, frozenset[State]] = {
    **dict.fromkeys(OVER, frozenset({State.BEGUN})),
    State.BEGUN: frozenset({State.BEGUN, State.SUBMITTED, State.FAILED}),
    State.SUBMITTED: frozenset({State.COMPUTED}),
    State.COMPUTED: frozenset({State.COMMITTED, State.SKIPPED, State.FAILED}),
}
"""The states that may follow each state; any other transition raises ``WrongState``."""


class Step:
    """The current step of one model, or the last one between two steps."""

    def __init__(
        self,
        lane: Lane,
        book: Book,
        *,
        scopes: Scopes,
        policy: NonFinitePolicy | None = None,
        scaler: Scaler | None = None,
        drift: DriftCheck | None = None,
    ) -> None:
        self.state = State.IDLE
        self.next = 0
        """The number of the next step; from the last bucket of a step on, that of the step after it."""
        self.number = -1
        """The number of this step."""
        self.lane = lane
        self.rank = scopes.rank
        self.world = scopes.world
        self.scaler = scaler
        self.on_begin: Callable[[bool], Exception | None] = _nothing
        """Called before each step, with whether this rank has joined. An error that it returns fails the step
        on all ranks."""
        self._book = book
        self._scopes = scopes
        self._policy = policy or NonFinitePolicy("propagate", lane.check)
        self._drift = drift
        self.may_postpone = False
        """Whether optimizers call ``finish_postponed`` before they step."""
        self._postponed: float | None = None  # when the backward ended whose step nobody has ended yet
        self._joined = False
        self._refusal: Exception | None = None  # what ``on_begin`` had against this step
        self._failure: BaseException | None = None  # of this step, once it is computed
        self._first_bucket_at = 0.0
        self._target: Lane | ResumedBuckets = lane  # the lane, but for the first steps after a resume
        self._scratch: dict[int, Scratch] = {}  # by the address of the flat gradient
        self._scale: float | None = None  # of the loss in this step, once it is known
        self._layouts: list[Layout] = []  # of the buckets of this step so far
        self._last_layouts: list[Layout] = []  # of the last step that had all its buckets
        self._expected: list[list[str]] = []  # names in the buckets of the next step, if these are others
        self.same_buckets = False
        """Whether a step has the same buckets in every process, so that a checkpoint need not know them."""

    def begin(self, strategy: Strategy, *, joined: bool = False) -> None:
        """Before the first bucket. A rank that has ``joined`` has no data any more, and sends zeros."""
        refusal = self._late_error()
        self._refusal = refusal or self.on_begin(joined)
        self._change_to(State.BEGUN)
        self.number, self._joined, self._failure = self.next, joined, None
        self._first_bucket_at = time.perf_counter()
        self._layouts, self._scale = [], None
        self._policy.begin_step(strategy, self.number, joined=joined)

    def submit(
        self,
        strategy: Strategy,
        flat: Tensor,
        layout: Layout,
        *,
        index: int,
        is_last: bool,
        finish: Finish = same,
        raises: bool = False,
        scratch: Scratch | None = None,
        dense_bytes: int | None = None,
    ) -> Future[Tensor]:
        """Give the lane the next bucket. The future holds its mean, as ``finish`` leaves it.

        Strategies see a complex gradient as pairs of real numbers, and so does ``layout``. A gradient that is
        at another address in each step comes with its own ``scratch``. ``dense_bytes``: what the plain mean
        of it would send, if that is not an all-reduce over all ranks.
        """
        self._change_to(State.SUBMITTED if is_last else State.BEGUN)
        self.next += is_last
        if scratch is None and not flat.is_sparse:
            scratch = self._scratch_for(flat)
        if flat.is_complex():
            flat, finish = torch.view_as_real(flat).view(-1), partial(_finish_complex, finish)
        bucket = Bucket(
            flat=flat,
            layout=layout,
            step=self.number,
            rank=self.rank,
            world=self.world,
            index=index,
            is_last=is_last,
            joined=self._joined,
            sizes=self._scopes.sizes,
            places=self._scopes.places,
            scratch=scratch,
        )
        if self.number < self._policy.check_own_until:
            self._policy.check_own(bucket)
        self._layouts.append(layout)
        if is_last:
            self._last_layouts, self._expected = self._layouts, []
        raw = flat.numel() * flat.element_size()
        if dense_bytes is None:
            dense_bytes = wire_bytes("all_reduce", raw, self.world)
        self._book.gradient(raw, dense_bytes, is_last)
        if self.scaler is not None:
            strategy = unscaled(strategy, self._scale_of_step)
        if self._refusal is not None:
            strategy = _Refused(self._refusal, strategy)
        return self._target.submit(strategy, bucket, finish=finish, raises=raises)

    def _scale_of_step(self) -> float:
        """The scale is on a device, where to ask for it is to wait."""
        if self._scale is None:
            assert self.scaler is not None
            self._scale = float(self.scaler.get_scale())
        return self._scale

    def break_off(self) -> None:
        """No more buckets follow: the lane already knows the error that fails this step."""
        self._change_to(State.SUBMITTED)
        self.next += 1

    @property
    def can_pass(self) -> bool:
        """Whether the next step may do without the lane: nothing of the last one is left to be ended or to be
        withheld from optimizers, and the lane is not to see the buckets of a checkpoint."""
        over = self.state in (State.IDLE, State.COMMITTED)
        due = self._drift is not None and self._drift.due(self.next)
        return over and not due and self._target is self.lane

    def passed(self, layouts: list[Layout] | None = None) -> None:
        """DDP itself has reduced the buckets of this step: these, if they are known."""
        self.number, self.next = self.next, self.next + 1
        if layouts is not None:
            self._last_layouts, self._expected = layouts, []

    def wait(self) -> BaseException | None:
        """Backward is over: wait for the lane. The error that failed the step on this rank, if any."""
        self.lane.drain()
        self._change_to(State.COMPUTED)
        self._failure = self.lane.take_failure()
        return self._failure

    def end(self, computed_at: float, ended_at: float | None = None) -> BaseException | None:
        """Commit, skip or fail the step; compare the weights if that is due. The error to raise, if any."""
        ended_at = ended_at or time.perf_counter()
        failure = self._failure
        error = self._conclude(failed=failure is not None)
        if not self._joined:
            self._book.step_ended(StepTimes(self.number, self._first_bucket_at, computed_at, ended_at))
        return failure or self.drift_of(self.number) or error

    def drift_of(self, number: int) -> BaseException | None:
        """The error of replicas that differ after this step, if they are to be compared after it."""
        if self._drift is None or not self._drift.due(number):
            return None
        return self._drift.error_of(number, joined=self._joined)

    def postpone(self, computed_at: float) -> bool:
        """Backward is over. Whether the host need not wait for the outcome yet: ``finish`` will, before the
        optimizer steps, and before anybody asks."""
        due = self._drift is not None and self._drift.due(self.number)
        if not self.may_postpone or due or self._policy.raises or not self.lane.order():
            return False
        self._postponed = computed_at
        return True

    def finish_postponed(self) -> None:
        """End the step whose end was postponed, if there is one."""
        if self._postponed is not None:
            self.finish()

    def _late_error(self) -> Exception | None:
        """End the step before. An error that was postponed until now must not be raised in DDP's hook."""
        if self._postponed is None:
            self.finish()
            return None
        try:
            self.finish()
        except GradlaneError as error:
            return error
        return None

    def finish(self) -> None:
        """End a step that nobody has ended: its end was postponed, or its backward stopped. In the second
        case the futures carried its error."""
        if self.state in OVER:
            return
        if self._postponed is not None:
            computed_at, self._postponed = self._postponed, None
            self.wait()
            if (late := self.end(computed_at, ended_at=computed_at)) is not None:
                raise late
            return
        stopped = self.state is State.BEGUN
        if stopped:
            self.lane.drain()
            self.lane.take_failure()
        elif self.state is State.SUBMITTED:
            self.wait()
        if (error := self._conclude(failed=stopped or self._failure is not None)) is not None:
            raise error

    def _conclude(self, *, failed: bool) -> NonFinite | None:
        skipped, error = self._policy.end_step(failed=failed)
        self._change_to(State.FAILED if failed else State.SKIPPED if skipped else State.COMMITTED)
        if skipped:
            self._book.skipped()
        return error

    def _change_to(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise WrongState(
                f"step {self.number} cannot become {state.name} ({state.value}): it is {self.state.name} "
                f"({self.state.value}); finish one backward before the next one begins"
            )
        self.state = state

    def layout(self) -> list[list[str]]:
        """The names of the parameters in each bucket of the next step; none before the first step."""
        if self.same_buckets:
            return []
        if isinstance(self._target, ResumedBuckets):
            return self._target.layout
        return self._expected or [[slot.name for slot in layout] for layout in self._last_layouts]

    def expect(self, names: list[list[str]]) -> None:
        """The next step will have other buckets than the last one, with these parameters."""
        self._expected = names

    def go_to(self, number: int, layout: Sequence[Sequence[str]] = ()) -> None:
        """Resume: the next step has this number, and the first steps have the buckets of ``layout``."""
        self.next = number
        self._target = ResumedBuckets(self.lane, layout, self._use_lane) if layout else self.lane
        self.lane.forget_failure()  # a step of this number may have failed before the resume

    def _scratch_for(self, flat: Tensor) -> Scratch:
        address = flat.data_ptr()
        scratch = self._scratch.get(address)
        if scratch is None:
            scratch = self._scratch[address] = Scratch()
        return scratch

    def forget_buckets(self) -> None:
        """DDP has rebuilt its buckets: drop the buffers made for the old ones."""
        self._scratch.clear()

    def _use_lane(self) -> None:
        self._target = self.lane


def _finish_complex(finish: Finish, mean: Tensor) -> Tensor:
    return finish(torch.view_as_complex(mean.view(-1, 2)))


@dataclass
class _Refused(Strategy):
    """Fails the step on all ranks. An error that is raised in DDP's hook would break DDP instead."""

    error: Exception
    instead_of: Strategy

    async def reduce(self, bucket: Bucket) -> Reduced:
        if bucket.flat.is_meta:  # the lane asks what the other ranks expect from this one
            return await self.instead_of.reduce(bucket)
        raise self.error


def _nothing(joined: bool) -> None:
    """Nobody has to know that a step begins."""
