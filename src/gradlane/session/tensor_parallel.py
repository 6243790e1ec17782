"""A session on a model with tensor parallelism: DDP's, or that of a loop without DDP."""

from __future__ import annotations

from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..settings import Settings
from ..strategies.across_replicas import AcrossReplicas


def across_replicas(strategy: Strategy) -> Strategy:
    """The world of the strategy are the data-parallel ranks, which are a part of the session's."""
    return strategy if isinstance(strategy, AcrossReplicas) else AcrossReplicas(strategy)


def refuse_options(settings: Settings, tensor_parallel: bool) -> None:
    if tensor_parallel and (settings.verify_every is not None or settings.ranks_per_node is not None):
        name = "verify_every" if settings.verify_every is not None else "ranks_per_node"
        raise InvalidValue(
            f"{name} is not possible on this model: with tensor parallelism ranks have different weights. "
            "Leave it out, or use replicate() or fully_shard() of FSDP2, whose mesh says which are alike"
        )
