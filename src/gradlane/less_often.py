"""``local_steps``: the ranks train alone for some steps, then agree on weights in a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .core.strategy import Strategy
from .ddp import attach
from .errors import InvalidValue, WrongState, WrongType
from .feed.own_buckets import DEFAULT_BUCKET_MB
from .feed.sharded_models import refuse_dtensors, refuse_fsdp1, refuse_fsdp2
from .feed.step_counter import checked_optimizer
from .lane.one_rank import OneRank
from .session.base import Session
from .session.local_training import LocalTraining, local_training_of
from .session.own_loop import OwnLoop, own_loop_of
from .settings import ScaledOptions, Settings
from .strategies.as_strategy import as_strategy
from .strategies.local_steps import Buffers, LocalSteps, Moments
from .strategies.mean import Mean
from .strategies.schedule import After
from .strategies.text import describe
from .torch_internals import uncompiled

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


def local_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str,
    *,
    every: int | None = None,
    warmup: int = 0,
    first: Strategy | str = "Mean()",
    inside: Strategy | str | None = None,
    fragments: int = 1,
    delay: int = 0,
    blend: float = 0.0,
    buffers: Buffers = "mean",
    moments: Moments = "own",
    group: dist.ProcessGroup | OneRank | None = None,
    bucket_mb: float = DEFAULT_BUCKET_MB,
    **options: Unpack[ScaledOptions],
) -> LocalTraining:
    """Let every rank train alone, and bring the ranks together every ``every`` steps, in a round.

    In a round each rank sends what it has learned since the last one, its weights of then less its weights of
    now, through ``strategy``; all ranks subtract the answer from the weights of the last round, and continue
    from there. The training loop stays as it is: ``optimizer.step()`` is counted. Call it on every rank, with
    the same weights everywhere, before the first step. All ranks compare options, parameters and weights.

    A round that fails raises in ``optimizer.step()`` on all ranks and leaves no trace: what was learned goes
    with the next round. If what a rank has learned is not finite, all ranks go back to the last round.

    Args:
        model: a module, or a DDP model, whose exchange of gradients is switched off until ``close``.
        optimizer: the optimizer that trains it, on every rank its own.
        strategy: what happens to the differences: ``"Mean()"``, ``"ErrorFeedback(Sharded(Int4()))"``, with
            ``Nesterov(...)`` around it DiLoCo. A ``LocalSteps(...)`` has ``every`` and the options up to
            ``moments`` in itself, but for ``inside``.
        every: steps between two rounds of the same parameters.
        warmup: steps at the beginning in which gradients are averaged as without local steps, by DDP or, for
            another model, before ``optimizer.step()``.
        first: the strategy of the warm-up, without memory: ``"Sharded(Int8())"``. The default leaves the
            warm-up to DDP with whatever hook it has.
        inside: a strategy that reduces the gradients of local steps too: ``NodeMean()`` keeps the ranks of a
            node together. Default: none.
        fragments: send the model in so many parts, in turns, ``every / fragments`` steps apart.
        delay: a round is applied so many steps after it began, and travels meanwhile.
        blend: share of this rank's own weights in what is applied; 0.5 is usual with a delay.
        buffers: "mean": floating-point buffers (BatchNorm's) are averaged in each round; "own": left alone.
        moments: "frozen": after the warm-up the second moment of Adam does not change any more, and is the
            same on all ranks (see ``freeze_moments``). "own": each rank goes on with its own.
        group: the process group of a model without DDP; the default one if None.
        bucket_mb: a bucket is closed as soon as it holds this many MiB.
        options: those of ``attach``. ``verify_every`` counts rounds; ``scaler`` keeps rounds together when
            the scaler of one rank leaves out a step.
    """
    chosen = _chosen(
        as_strategy(strategy), every, warmup=warmup, first=as_strategy(first), fragments=fragments,
        delay=delay, blend=blend, buffers=buffers, moments=moments,
    )  # fmt: skip
    settings = Settings(**options)
    optimizer = checked_optimizer(optimizer)
    if not isinstance(model, nn.Module):
        raise WrongType(f"local_steps needs a module, got {type(model).__name__}; pass the model")
    model = uncompiled(model)
    refuse_fsdp1(model)
    whole = "local steps need a full copy on each rank: train the model with DDP, or without it"
    refuse_fsdp2(model, whole)
    refuse_dtensors(model, whole)
    if local_training_of(model) is not None:
        raise WrongState(
            "this model has local steps already; use their swap(strategy), or close() them first"
        )
    if isinstance(model, DistributedDataParallel) and group is not None:
        raise InvalidValue("group= is for a model without DDP; a DDP model has its own")
    within = None if inside is None else as_strategy(inside)
    gradients = _gradients_of(model, chosen, within, group, settings)
    try:
        return LocalTraining(
            model, optimizer, chosen, settings, group=group, bucket_mb=bucket_mb, gradients=gradients,
            keep_gradients=within is not None,
            inside=None if within is None else describe(within, shared_only=True),
        )  # fmt: skip
    except BaseException:
        if gradients is not None:
            gradients.close()
        raise


def _chosen(strategy: Strategy, every: int | None, **others: Any) -> LocalSteps:
    if isinstance(strategy, LocalSteps):
        defaults = LocalSteps(Mean())
        if every is not None or any(value != getattr(defaults, name) for name, value in others.items()):
            raise InvalidValue(
                f"{describe(strategy, short=True)} has its options in itself; write them there, and not as "
                "options of local_steps"
            )
        return strategy
    if every is None:
        raise InvalidValue(
            "local_steps needs every=, the steps between two rounds; try 16 with SGD, 8 with Adam"
        )
    return LocalSteps(strategy, every, **others)


def _gradients_of(
    model: nn.Module,
    chosen: LocalSteps,
    inside: Strategy | None,
    group: dist.ProcessGroup | OneRank | None,
    settings: Settings,
) -> Session | None:
    """What reduces gradients in the warm-up, or all the time where there is an ``inside``."""
    warmup, first = chosen.warmup, chosen.first
    reduced = first if inside is None else After(warmup, inside, first)
    if isinstance(model, DistributedDataParallel):
        if inside is None and (not warmup or first == Mean()):
            return None  # DDP itself, with whatever hook it has
        return attach(
            model, reduced, timeout=settings.timeout, ranks_per_node=settings.ranks_per_node,
            scaler=settings.scaler,
        )  # fmt: skip
    if isinstance(group, OneRank):
        return None  # nobody to exchange gradients with
    if own_loop_of(model) is not None:
        if inside is not None or first != Mean():
            raise WrongState(
                "reduce_gradients works on this model already; close() it, or leave out inside= and first="
            )
        return None  # the loop calls it
    if inside is None and not warmup:
        return None
    return OwnLoop(
        model, reduced,
        Settings(timeout=settings.timeout, ranks_per_node=settings.ranks_per_node, scaler=settings.scaler),
        group=group,
    )  # fmt: skip
