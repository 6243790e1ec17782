"""``reduce_gradients``: one strategy in a training loop without DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from .core.strategy import Strategy
from .errors import WrongState
from .feed.own_buckets import DEFAULT_BUCKET_MB
from .session.own_loop import OwnLoop, own_loop_of
from .settings import ScaledOptions, Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on


def attach_without_ddp(
    model: nn.Module,
    strategy: Strategy | str,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_mb: float = DEFAULT_BUCKET_MB,
    **options: Unpack[ScaledOptions],
) -> OwnLoop:
    """Let a strategy reduce the gradients of a model without DDP, in ``reduce_gradients(model)``.

    The first ``reduce_gradients(model, strategy)`` does the same. Call this one to load a checkpoint before
    the first step, or for the ``with`` form.

    Call it on every rank of the group, when the model has its parameters. All ranks compare library version,
    strategy and options, and parameters; if anything differs all of them raise ``RanksDisagree`` and name it.
    The weights must be the same on all ranks. That is up to you: DDP would send those of rank 0.

    Args:
        model: any module; the gradients of all its parameters that are not frozen are reduced.
        strategy: a strategy, or its text: ``"ErrorFeedback(Sharded(Int8()))"``.
        group: the process group; the default one if None.
        bucket_mb: a bucket is closed as soon as it holds this many MiB.
        options: those of ``attach``.
    """
    return OwnLoop(model, strategy, Settings(**options), group=group, bucket_mb=bucket_mb)


def reduce_gradients(
    model: nn.Module,
    strategy: Strategy | str | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_mb: float = DEFAULT_BUCKET_MB,
    **options: Unpack[ScaledOptions],
) -> OwnLoop:
    """Replace ``p.grad`` of every parameter by what all ranks agree on, the mean for most strategies.

    Call it after backward, once a step, on every rank. The first call attaches the strategy, as
    ``attach_without_ddp`` does, which says what the arguments are. Later calls use the same strategy and
    options; without a strategy a call uses what is attached. It returns the attachment, for its metrics, its
    checkpoints, ``swap`` and ``close``.

    A gradient that is missing on some ranks counts as zeros there; where all ranks lack it, it stays None.
    Errors are raised here, on all ranks, and leave ``p.grad`` as it was.
    """
    own_loop = own_loop_of(model)
    if own_loop is None:
        if strategy is None:
            raise WrongState(
                "nothing is attached to this model; pass a strategy: reduce_gradients(model, strategy), or "
                "call attach_without_ddp(model, strategy) first"
            )
        own_loop = attach_without_ddp(model, strategy, group=group, bucket_mb=bucket_mb, **options)
    elif strategy is not None:
        own_loop.refuse_other(strategy, group, bucket_mb, Settings(**options))
    own_loop.reduce()
    return own_loop
