"""A request between two steps: no bucket of a gradient, and no message that ends a step."""

from __future__ import annotations

from torch import Tensor

from ..core.bucket import Bucket, Slot
from ..core.scopes import Scopes
from ..core.strategy import Strategy
from .base import Lane


def perform_now(lane: Lane, scopes: Scopes, strategy: Strategy, flat: Tensor, step: int = 0) -> Tensor:
    """What the strategy makes of the tensor. All ranks call it between the same two steps."""
    future = lane.submit(strategy, bucket_of(flat, scopes, step))
    drain(lane)
    return future.wait()


def drain(lane: Lane) -> None:
    """Wait for the lane; raise what failed there."""
    lane.drain()
    if (failure := lane.take_failure()) is not None:
        raise failure


def bucket_of(flat: Tensor, scopes: Scopes, step: int = 0) -> Bucket:
    """Not the last one of its step: then the lane sends no message that ends it."""
    return Bucket(
        flat=flat, layout=(Slot("figures", flat.shape),), step=step, rank=scopes.rank, world=scopes.world,
        is_last=False, sizes=scopes.sizes, places=scopes.places,
    )  # fmt: skip
