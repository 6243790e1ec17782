"""What a lane is, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket
from ..core.collectives import Note
from ..core.events import Event
from ..core.strategy import Strategy
from .finite import FiniteCheck

Finish = Callable[[Tensor], Tensor]


def same(mean: Tensor) -> Tensor:
    return mean


class Listener(Protocol):
    """Hears of every performed request; runs on the lane, so it had better be quick."""

    def heard(self, event: Event) -> None: ...
    def noted(self, bucket: Bucket, note: Note) -> None: ...


class Lane(Protocol):
    """Runs strategies, one bucket after the other, in the order they were submitted.

    A failure is kept, not thrown: the future is completed with the bucket's own gradient, so that
    DDP's book-keeping stays whole, and ``take_failure`` hands the error to whoever may raise it.
    ``loud`` futures carry the error themselves, for callers that wait for them.
    """

    check: FiniteCheck

    def submit(
        self, strategy: Strategy, bucket: Bucket, *, finish: Finish = same, loud: bool = False
    ) -> Future[Tensor]:
        """``finish`` turns the mean into what the future holds."""

    def drain(self) -> None: ...
    def take_failure(self) -> BaseException | None: ...
    def forget_failure(self) -> None: ...
    def close(self) -> None: ...
    def where(self) -> str: ...


def completed_future(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future
