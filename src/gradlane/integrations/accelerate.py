"""Accelerate: ``attach_accelerate`` after ``prepare``, and ``log_metrics`` for its trackers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..core.strategy import Strategy
from ..errors import InvalidValue, WrongState, WrongType
from ..session import Session
from ..settings import Options
from ..strategies.as_strategy import as_strategy
from ..torch_internals import uncompiled
from ..with_optimizer import needs_optimizer
from .agreed_weights import copied
from .models import is_fsdp2, refuse_fsdp1
from .one_process import attached
from .resume import load_from
from .with_optimizer import steps_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

GIVE = "attach_accelerate(accelerator, model, strategy, optimizer=optimizer)"
START_EMPTY = "call accelerator.load_state before attach_accelerate"
PENDING = "_gradlane_pending"  # an attribute of an Accelerator: what load_state has to load at its end

_attached: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Session], list[RemovableHandle]]]
_attached = weakref.WeakKeyDictionary()


def attach_accelerate(
    accelerator: Accelerator,
    model: nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Unpack[Options],
) -> Session:
    """``gradlane.attach`` for a model that ``accelerator.prepare`` has returned; the options are the same.

    The scaler is the accelerator's own. From now on ``accelerator.save_state`` also writes the memory of each
    rank into the folder ``gradlane`` of the checkpoint, and ``load_state`` reads it. To load a checkpoint
    without that folder, call ``load_state`` before this. In one process ``prepare`` makes no DDP model, and
    the strategy runs on one rank, at the end of ``accelerator.backward``.

    With ``FullyShardedDataParallelPlugin(fsdp_version=2)`` the model is one of FSDP2; ``gradlane.attach``
    says which strategies work on it.

    ``LocalSteps(...)`` and 1-bit Adam work with the optimizer: the one of the accelerator that trains this
    model, or ``optimizer``. With local steps the model's file in a checkpoint has the weights that all ranks
    agreed on, and the folder ``gradlane`` those of each rank.
    """
    inner, index = _prepared(accelerator, model)
    strategy = as_strategy(strategy)
    before, handles = _attached.get(inner, (None, []))
    if before is not None and (session := before()) is not None and session.is_open:
        raise WrongState(
            "this model has an attachment already; use attachment.swap(strategy), or close() it first"
        )
    if optimizer is None and needs_optimizer(strategy):
        optimizer = _only_optimizer(accelerator, inner)
    attachment = attached(accelerator, inner, strategy, optimizer, give=GIVE, options=options)
    name = f"gradlane_{index}" if index else "gradlane"

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        attachment.save(Path(folder) / name)
        if attachment.gives == "weights" and attachment.is_open and index < len(weights):
            with attachment.agreed():
                weights[index] = copied(weights[index])

    def load(models: list[nn.Module], folder: str) -> None:
        read = partial(load_from, attachment, Path(folder) / name, start_empty=START_EMPTY)
        if attachment.gives == "weights":
            vars(accelerator)[PENDING].append(read)  # Accelerate is about to load the weights of all ranks
        else:
            read()

    for handle in handles:
        handle.remove()
    _load_last(accelerator)
    handles = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    _attached[inner] = weakref.ref(attachment), handles
    return attachment


def log_metrics(accelerator: Accelerator, attachment: Session, *, every: int = 1) -> None:
    """Log the metrics to the accelerator's trackers, every ``every`` steps of the optimizer.

    Call it after each micro-batch; it does nothing between the micro-batches of a step.
    """
    if every < 1:
        raise InvalidValue(f"every={every}; it counts steps, from 1 on")
    if accelerator.sync_gradients and steps_of(attachment) % every == 0:
        accelerator.log(attachment.metrics(), step=steps_of(attachment))


def _load_last(accelerator: Any) -> None:
    """Make ``load_state`` load what is pending when it has loaded everything else."""
    if PENDING in vars(accelerator):
        return
    pending: list[Callable[[], None]] = []
    vars(accelerator)[PENDING] = pending
    load_state = accelerator.load_state

    @wraps(load_state)
    def and_each_rank(*args: Any, **kwargs: Any) -> None:
        pending.clear()
        load_state(*args, **kwargs)
        while pending:
            pending.pop(0)()

    accelerator.load_state = and_each_rank


def _only_optimizer(accelerator: Accelerator, model: nn.Module) -> torch.optim.Optimizer:
    """The prepared optimizer that trains this model."""
    own = set(model.parameters())
    found: list[torch.optim.Optimizer] = [
        optimizer
        for optimizer in accelerator._optimizers
        if any(p in own for group in optimizer.param_groups for p in group["params"])
    ]
    if len(found) != 1:
        raise InvalidValue(
            f"LocalSteps and 1-bit Adam work with one optimizer, and {len(found)} of those that prepare has "
            f"returned train this model; prepare it first, or name it: {GIVE}"
        )
    return found[0]


def _prepared(accelerator: Accelerator, model: nn.Module) -> tuple[nn.Module, int]:
    """The model of DDP or FSDP2, or the plain one of a single process; and its index among the models of the
    accelerator, by which it numbers its files."""
    if not isinstance(accelerator, Accelerator):
        raise WrongType(
            f"got a {type(accelerator).__name__}, not an Accelerator; write "
            "attach_accelerate(accelerator, model, strategy)"
        )
    found = uncompiled(model)  # a compiled module holds the one that has the gradients
    ddp, sharded = isinstance(found, DistributedDataParallel), is_fsdp2(model)
    whole = not ddp and (sharded or accelerator.distributed_type == DistributedType.NO)
    if not ddp and not whole and getattr(model, "_is_accelerate_prepared", False):
        refuse_fsdp1(model, "FullyShardedDataParallelPlugin(fsdp_version=2)")
        raise WrongType(
            "gradlane works on models of DDP and FSDP2, and with "
            f"distributed_type={accelerator.distributed_type.value} prepare made a {type(found).__name__}; "
            "use it without DeepSpeed and the like"
        )
    for index, known in enumerate(accelerator._models):  # the modules inside of DDP, the others themselves
        if (ddp and known is found.module) or (whole and known in (found, model)):
            return model if sharded else found, index
    raise WrongState(
        f"this {type(model).__name__} is not what prepare returned; call model = accelerator.prepare(model) "
        "first, then attach_accelerate(accelerator, model, strategy)"
    )
