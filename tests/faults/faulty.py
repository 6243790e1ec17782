"""A strategy that does something bad at one point of its way, on purpose."""

import os
import random
import signal
import time
from dataclasses import dataclass

import gradlane as gl
from gradlane.core.running import intercept
from gradlane.local import tell

MOMENTS = ("before encoding", "encoded", "answered", "at its end")
"""Where a strategy can be: nothing done yet, about to ask, with an answer not yet read, state updated."""


class Broken(Exception):
    """The strategy's own error, so that its type can be told from all others."""


@dataclass(frozen=True)
class Point:
    """A rank, a step, a bucket (-1: the last) and a moment of the strategy there."""

    rank: int
    step: int
    bucket: int
    moment: str

    @classmethod
    def drawn(cls, chance: random.Random, world: int, *, moments=MOMENTS, steps=(1, 5), buckets=(0, 1, -1)):
        return cls(
            chance.randrange(world), chance.randrange(*steps), chance.choice(buckets), chance.choice(moments)
        )

    def is_here(self, bucket: gl.Bucket, moment: str) -> bool:
        return (
            (self.rank, self.step, self.moment) == (bucket.rank, bucket.step, moment)
            and (self.bucket == bucket.index or (self.bucket == -1 and bucket.is_last))
        )  # fmt: skip


@dataclass
class Faulty(gl.Strategy):
    """``inner``, but at ``point`` this happens: "raise", "kill", "stop" or "sleep"."""

    inner: gl.Strategy
    point: Point
    what: str = "raise"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._fired = False

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        self._at(bucket, "before encoding")

        async def answer(request):
            self._at(bucket, "encoded")
            reply = await request
            self._at(bucket, "answered")
            return reply

        reduced = await intercept(self.inner.reduce(bucket), answer)
        self._at(bucket, "at its end")
        return reduced

    def _at(self, bucket: gl.Bucket, moment: str) -> None:
        if self._fired or not self.point.is_here(bucket, moment):
            return
        self._fired = True
        fire(self.what, self.seconds, str(self.point))


def fire(what: str, seconds: float, text: str) -> None:
    """Do it, and tell the parent just before: the proof that the fault was there, and when."""
    tell(("fired", time.monotonic()))
    if what == "raise":
        raise Broken(f"on purpose at {text}")
    if what == "sleep":
        time.sleep(seconds)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
