"""A strategy whose world is one scope of the rank's."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from ..errors import InvalidValue
from .bucket import Bucket
from .collectives import Request, Scope, StepSum, all_reduce
from .layout import Layout
from .running import intercept
from .scopes import Scopes

T = TypeVar("T")


def within(bucket: Bucket, over: Scope, flat: Tensor, layout: Layout) -> Bucket:
    """A bucket for a strategy whose world is a scope of this bucket's."""
    scopes = Scopes(bucket.sizes, bucket.places).within(over)
    return replace(
        bucket, flat=flat, layout=layout, rank=scopes.rank, world=scopes.world, sizes=scopes.sizes,
        places=scopes.places, scratch=bucket.scratch and bucket.scratch.part(over),
    )  # fmt: skip


async def in_scope(coroutine: Coroutine[Any, Any, T], over: Scope) -> T:
    """Run a strategy whose world is a scope. What it asks of the world is asked of that scope.

    A rank has one part of the gradient, and the other ranks of its node have the other parts. So a
    ``step_sum`` over the gradient across nodes is one over the node too.
    """

    async def answer(request: Request) -> object:
        if request.over != "world":
            raise InvalidValue(
                f"a strategy inside Hierarchical asks for {request}; its world is already "
                f"the scope {over!r}, so it can ask over='world' only"
            )
        return await replace(request, over=over)

    async def add_up(part: StepSum) -> Tensor:
        total = await part
        return await all_reduce(total.clone(), op="sum", over="node", exact=True)

    return await intercept(coroutine, answer, add_up if over == "cross" else None)
