"""A strategy at work on a model whose optimizer is known: in a framework, or in ``gradlane train``.

There a text says all. ``LocalSteps(...)`` counts the optimizer's steps, ``After(60, SharedMomentum(...))``
freezes the moments of its Adam, and any other strategy needs no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .core.strategy import Strategy
from .ddp import attach
from .errors import InvalidValue
from .feed.adam_moments import betas_of
from .feed.step_counter import checked_optimizer
from .freeze import freeze_moments
from .fsdp_internals import param_groups
from .lane.one_rank import OneRank
from .less_often import local_steps
from .session.base import Session
from .session.one_process import warn_of_one_process
from .settings import ScaledOptions
from .strategies.as_strategy import as_strategy
from .strategies.local_steps import LocalSteps
from .strategies.schedule import After
from .strategies.shared_momentum import SharedMomentum
from .strategies.text import describe

if TYPE_CHECKING:
    from typing_extensions import Unpack

Attach = Callable[[Strategy], Session]


def needs_optimizer(strategy: Strategy) -> bool:
    return isinstance(strategy, LocalSteps) or sends_momentum(strategy)


def attach_with_optimizer(
    model: nn.Module,
    optimizer: object,
    strategy: Strategy | str,
    *,
    attach_alone: Attach | None = None,
    **options: Unpack[ScaledOptions],
) -> Session:
    """``attach``, ``local_steps``, or ``attach`` and ``freeze_moments``: what the strategy is made for.

    ``model`` is a model of DDP or FSDP2, or the plain model of a single process; for the latter
    ``attach_alone`` attaches a strategy that reduces gradients.
    """
    strategy = as_strategy(strategy)
    sharded = bool(param_groups(model))
    if sharded:
        refuse_on_shards(strategy)
    alone = not sharded and not isinstance(model, DistributedDataParallel)
    if isinstance(strategy, LocalSteps):
        trained_by = checked_optimizer(optimizer)
        if alone:
            warn_of_one_process()
        return local_steps(model, trained_by, strategy, group=OneRank() if alone else None, **options)

    def attached(reducing: Strategy) -> Session:
        if alone and attach_alone is not None:
            return attach_alone(reducing)
        return attach(model, reducing, **options)  # it refuses other models

    if isinstance(strategy, After) and sends_momentum(strategy):
        return _frozen_later(checked_optimizer(optimizer), strategy, attached)
    return attached(strategy)


def refuse_on_shards(strategy: Strategy) -> None:
    """On a model of FSDP2 no strategy works with the optimizer."""
    if needs_optimizer(strategy):
        raise InvalidValue(
            f"{describe(strategy, short=True)} works with the optimizer of a full copy, and with FSDP each "
            "rank has a part of the model; use DDP, or a strategy that reduces gradients only: "
            "'ErrorFeedback(Sharded(Int4()))' on a mesh with replicas, 'Sharded(Int8())' on one without"
        )


def sends_momentum(strategy: Strategy) -> bool:
    """Whether it is 1-bit Adam: gradients first, then momentum."""
    return isinstance(strategy, After) and isinstance(strategy.then, SharedMomentum)


def _frozen_later(optimizer: torch.optim.Optimizer, strategy: After, attached: Attach) -> Session:
    shared = strategy.then
    assert isinstance(shared, SharedMomentum)
    for group in optimizer.param_groups:
        if "betas" in group and not isinstance(shared.beta, dict) and betas_of(group)[0] != shared.beta:
            raise InvalidValue(
                f"{describe(shared, short=True)} has beta={shared.beta}, and Adam has {betas_of(group)[0]}; "
                "write the same beta in both"
            )
    session = attached(strategy.first)
    try:
        freeze_moments(
            optimizer, session, after=strategy.step, then=shared.inner, refresh=strategy.refresh
        )  # fmt: skip
    except BaseException:
        session.close()
        raise
    return session
