"""One strategy on its way through one bucket: what every driver shares."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from inspect import iscoroutine
from typing import Any, TypeVar

from torch import Tensor

from ..errors import InvalidValue, WrongType
from .bucket import Bucket
from .collectives import Note, Request, StepSum
from .strategy import Reduced, Strategy
from .trust import is_our_own

T = TypeVar("T")
NoteTaker = Callable[[Bucket, Note], None]
Look = Callable[[Bucket, Reduced], None]


def _nobody_looks(bucket: Bucket, reduced: Reduced) -> None: ...


class Running:
    """Drives ``strategy.reduce(bucket)`` from request to request; says where it is when asked."""

    def __init__(
        self, strategy: Strategy, bucket: Bucket, take_note: NoteTaker, look: Look = _nobody_looks
    ) -> None:
        self.strategy = strategy
        self.bucket = bucket
        self.request: Request | None = None
        self.meeting: StepSum | None = None  # while it waits for the other buckets of its step
        self.phase = -1
        self.reduced: Reduced | None = None
        self.bounded: object = None  # an answer that is a mean of what the ranks know to be bounded
        self._take_note = take_note
        self._look = look  # at the answer
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    def resume(self, answer: object = None) -> Request | None:
        """Go on with the answer to the last request, or the sum that was waited for.

        The next request; None when done, or when ``meeting`` is set.
        """
        self.meeting = None
        if self._coroutine is None:
            self._coroutine = _started(self.strategy, self.bucket)
        while True:
            try:
                asked = self._coroutine.send(answer)
            except StopIteration as end:
                self.reduced = _checked(end.value, self.bucket, self.strategy)
                bounded = self.reduced.bounded or self.reduced.mean is self.bounded
                self.reduced = replace(self.reduced, bounded=bounded and is_our_own(self.strategy))
                self._look(self.bucket, self.reduced)
                return None
            if isinstance(asked, Request):
                self.request = asked
                self.phase += 1
                return asked
            if isinstance(asked, StepSum):
                self.meeting = asked
                return None
            if not isinstance(asked, Note):
                self.close()
                raise WrongType(
                    f"{type(self.strategy).__name__}.reduce awaited {_kind(asked)}; a strategy may "
                    "only await gradlane.all_reduce, all_gather, all_to_all, step_sum and note "
                    "(there is no event loop)"
                )
            self._take_note(self.bucket, asked)
            answer = None

    def where(self) -> str:
        """For error messages: strategy, step, bucket, phase."""
        bucket = self.bucket
        names = bucket.names
        held = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if names else "nothing"
        at = f"step {bucket.step}, bucket {bucket.index} ({held})"
        return f"{type(self.strategy).__name__}, {at}, {self.doing()}"

    def doing(self) -> str:
        phase = "before its first request" if self.request is None else f"phase {self.phase}: {self.request}"
        return phase if self.meeting is None else f"{phase}, waiting for the step's other buckets"

    def close(self) -> None:
        """Give up: run the coroutine's ``finally`` blocks and forget it."""
        if self._coroutine is not None:
            self._coroutine.close()


def step_total(waiting: Sequence[Running]) -> Tensor:
    """What ``step_sum`` answers to buckets that wait, in their order."""
    meetings = [running.meeting for running in waiting if running.meeting is not None]
    tensors = [meeting.tensor for meeting in meetings]
    for running, meeting, tensor in zip(waiting, meetings, tensors, strict=True):
        if meeting.of is not meetings[0].of:
            raise InvalidValue(
                f"{running.where()}: two strategies with a step_sum of their own meet in one step; route all "
                "parameters that need one to the same strategy, or use rules that decide bucket by bucket"
            )
        if tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype:
            raise WrongType(
                f"{running.where()}: step_sum of {tensor.dtype} {list(tensor.shape)}, an earlier bucket gave "
                f"{tensors[0].dtype} {list(tensors[0].shape)}; all buckets of a step give the same"
            )
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


async def intercept(coroutine: Coroutine[Any, Any, T], answer: Callable[[Request], Awaitable[Any]]) -> T:
    """Run a coroutine and let ``answer`` serve its requests: how a strategy wraps another's wire."""
    reply: Any = None
    while True:
        try:
            asked = coroutine.send(reply)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(asked, Request):
            reply = await answer(asked)
        else:  # a note, or something the driver will refuse
            reply = await _Passed(asked)


class _Passed:
    def __init__(self, asked: object) -> None:
        self.asked = asked

    def __await__(self) -> Any:
        return (yield self.asked)


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
