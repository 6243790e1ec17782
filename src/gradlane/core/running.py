"""One strategy at work on one bucket, and the loop by which every driver serves it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from inspect import iscoroutine
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from ..errors import InvalidValue, WrongType
from .bucket import Bucket
from .collectives import Note, Request, StepSum
from .strategy import Reduced, Strategy

T = TypeVar("T")
State = Request | StepSum | Reduced
NoteTaker = Callable[[Bucket, Note], None]


class Running:
    """Drives ``strategy.reduce(bucket)`` from request to request; says where it is when asked."""

    def __init__(self, strategy: Strategy, bucket: Bucket, take_note: NoteTaker) -> None:
        self.strategy = strategy
        self.bucket = bucket
        self.state: State | None = None
        """What ``resume`` returned last; None before, and while the strategy runs."""
        self.request: Request | None = None  # the last one
        self.phase = -1  # its number
        self.resumed = 0.0  # when the strategy was last resumed, by ``time.perf_counter``
        self.bounded_answer: object = None
        """An answer that is the mean of tensors whose ranks know them to be bounded. A strategy that returns
        it as its result has a bounded result."""
        self._take_note = take_note
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    def resume(self, answer: object = None) -> State:
        """Run the strategy until it awaits something or returns; ``answer`` is what it awaited before.

        - ``Request``: perform it, then resume with its answer.
        - ``StepSum``: this bucket waits for the other buckets of its step; resume with their ``step_total``.
        - ``Reduced``: the strategy has finished.
        """
        self.resumed, self.state = time.perf_counter(), None
        self.state = state = self._next(answer)
        if isinstance(state, Request):
            self.request = state
            self.phase += 1
        return state

    def _next(self, answer: object) -> State:
        if self._coroutine is None:
            self._coroutine = _started(self.strategy, self.bucket)
        while True:
            try:
                awaited = self._coroutine.send(answer)
            except StopIteration as end:
                reduced = _checked(end.value, self.bucket, self.strategy)
                if reduced.mean is self.bounded_answer and not reduced.bounded:
                    return replace(reduced, bounded=True)
                return reduced
            if isinstance(awaited, Request) or isinstance(awaited, StepSum):  # noqa: SIM101  a union is slow
                return awaited
            if not isinstance(awaited, Note):
                self.close()
                raise WrongType(
                    f"{type(self.strategy).__name__}.reduce awaited {_kind(awaited)}; a strategy may "
                    "only await gradlane.all_reduce, all_gather, all_to_all, reduce_scatter, step_sum and "
                    "note (there is no event loop)"
                )
            self._take_note(self.bucket, awaited)
            answer = None

    def where(self) -> str:
        """For error messages: strategy, step, bucket, phase."""
        bucket = self.bucket
        names = bucket.names
        content = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if names else "nothing"
        at = f"step {bucket.step}, bucket {bucket.index} ({content})"
        return f"{type(self.strategy).__name__}, {at}, {self.doing()}"

    def doing(self) -> str:
        phase = "before its first request" if self.request is None else f"phase {self.phase}: {self.request}"
        return f"{phase}, waiting for the step's other buckets" if isinstance(self.state, StepSum) else phase

    def close(self) -> None:
        """Stop early: run the coroutine's ``finally`` blocks."""
        if self._coroutine is not None:
            self._coroutine.close()


class Drivable(Protocol):
    """A ``Running``, or several of them that go in lock-step."""

    @property
    def state(self) -> State | None: ...
    def resume(self, answer: Any) -> State: ...


D = TypeVar("D", bound=Drivable)


class Driver(ABC, Generic[D]):
    """The loop that all drivers share: lanes, ``Simulation`` and dry run.

    A driver says how a request is performed, what follows when the strategy has taken the answer, and what
    becomes of the result.
    """

    serving: D | None = None
    """The bucket whose strategy runs or waits for an answer; for messages."""

    @abstractmethod
    def perform(self, running: D, request: Request) -> object:
        """Return the answer to the request."""

    def performed(self, running: D) -> None:
        """The strategy has taken the answer, or has raised."""

    @abstractmethod
    def finished(self, running: D, reduced: Reduced) -> None:
        """The strategy has returned its result."""

    def total(self, waiting: Sequence[D]) -> object:
        """The answer to all ``step_sum`` of these buckets."""
        return step_total(waiting)  # type: ignore[arg-type]

    def advance(self, running: D) -> None:
        """Serve a bucket that was resumed, until it has finished or waits for the step's other buckets."""
        self.serving = running
        while isinstance(request := running.state, Request):
            answer = self.perform(running, request)
            try:
                running.resume(answer)
            finally:
                self.performed(running)
        if isinstance(request, Reduced):
            self.finished(running, request)

    def meet(self, buckets: Sequence[D]) -> None:
        """The step has no more buckets: answer those that wait for a sum over the step, in their order."""
        while waiting := [running for running in buckets if isinstance(running.state, StepSum)]:
            total = self.total(waiting)
            for running in waiting:
                self.serving = running
                running.resume(total)
                self.advance(running)


def step_total(waiting: Sequence[Running]) -> Tensor:
    """The answer to ``step_sum`` of all buckets that wait for it, in bucket order."""
    sums = [running.state for running in waiting if isinstance(running.state, StepSum)]
    first = sums[0]
    for running, part in zip(waiting, sums, strict=True):
        if part.of is not first.of:
            raise InvalidValue(
                f"{running.where()}: two strategies with a step_sum of their own meet in one step; route all "
                "parameters that need one to the same strategy, or use rules that decide bucket by bucket"
            )
        if part.tensor.shape != first.tensor.shape or part.tensor.dtype != first.tensor.dtype:
            raise WrongType(
                f"{running.where()}: step_sum of {part.tensor.dtype} {list(part.tensor.shape)}, an earlier "
                f"bucket gave {first.tensor.dtype} {list(first.tensor.shape)}; all buckets of a step give "
                "the same"
            )
    total = first.tensor.clone()
    for part in sums[1:]:
        total += part.tensor
    return total


async def intercept(
    coroutine: Coroutine[Any, Any, T],
    answer: Callable[[Request], Awaitable[Any]],
    add_up: Callable[[StepSum], Awaitable[Tensor]] | None = None,
) -> T:
    """Run a coroutine and let ``answer`` serve its requests: how a strategy wraps another's wire. ``add_up``
    serves its sums over the step; without it they go on to the driver."""
    reply: Any = None
    while True:
        try:
            awaited = coroutine.send(reply)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(awaited, Request):
            reply = await answer(awaited)
        elif add_up is not None and isinstance(awaited, StepSum):
            reply = await add_up(awaited)
        else:  # a note, or what the driver will refuse
            reply = await _Forwarded(awaited)


class _Forwarded:
    def __init__(self, awaited: object) -> None:
        self.awaited = awaited

    def __await__(self) -> Any:
        return (yield self.awaited)


def _started(strategy: Strategy, bucket: Bucket) -> Coroutine[Any, Any, Any]:
    coroutine = strategy.reduce(bucket)
    if not iscoroutine(coroutine):
        raise WrongType(
            f"{type(strategy).__name__}.reduce returned {_kind(coroutine)}; write `async def reduce`"
        )
    return coroutine


def _checked(result: object, bucket: Bucket, strategy: Strategy) -> Reduced:
    name = type(strategy).__name__
    if not isinstance(result, Reduced):
        raise WrongType(f"{name}.reduce returned {_kind(result)}; return gradlane.Reduced(mean)")
    mean, flat = result.mean, bucket.flat
    if not isinstance(mean, Tensor):
        raise WrongType(f"{name}.reduce returned Reduced({_kind(mean)}); the mean is a tensor")
    if mean.shape != flat.shape or mean.dtype != flat.dtype:
        raise WrongType(
            f"{name}.reduce returned {mean.dtype} of shape {tuple(mean.shape)} for a bucket of "
            f"{flat.dtype} of shape {tuple(flat.shape)}; return the bucket's own shape and dtype"
        )
    return result


def _kind(value: object) -> str:
    return "nothing (None)" if value is None else f"an object of type {type(value).__name__}"
