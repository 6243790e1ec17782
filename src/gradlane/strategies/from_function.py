"""A strategy made of one async function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction

from torch import Tensor

from ..core.bucket import Bucket
from ..core.strategy import Reduced, Strategy
from ..errors import WrongType

ReduceFunction = Callable[[Bucket], Awaitable[Reduced | Tensor]]


@dataclass
class FromFunction(Strategy):
    function: ReduceFunction

    async def reduce(self, bucket: Bucket) -> Reduced:
        result = await self.function(bucket)
        return Reduced(result) if isinstance(result, Tensor) else result


def strategy_from(function: ReduceFunction) -> Strategy:
    """Make a strategy of ``async def f(bucket)``, which returns a ``Reduced``, or just the mean.

    Also a decorator. For options or state write a dataclass that derives from ``Strategy``.
    """
    if not iscoroutinefunction(function):
        raise WrongType(
            f"strategy_from takes an async function, got {getattr(function, '__name__', function)!r}; "
            "write `async def f(bucket): return await all_reduce(bucket.flat)`"
        )
    return FromFunction(function)
