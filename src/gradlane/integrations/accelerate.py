"""Accelerate: ``attach_accelerate`` after ``prepare``, and ``log_metrics`` for its trackers."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..core.strategy import Strategy
from ..errors import InvalidValue, WrongState, WrongType
from ..session import Session
from ..settings import Options
from ..torch_internals import uncompiled
from .one_process import attached
from .resume import load_from

if TYPE_CHECKING:
    from typing_extensions import Unpack

_hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def attach_accelerate(
    accelerator: Accelerator,
    model: nn.Module,
    strategy: Strategy | str,
    **options: Unpack[Options],
) -> Session:
    """``gradlane.attach`` for a model that ``accelerator.prepare`` has returned; the options are the same.

    The scaler is the accelerator's own. From now on ``accelerator.save_state`` also writes the memory of each
    rank into the folder ``gradlane`` of the checkpoint, and ``load_state`` reads it. To load a checkpoint
    without that folder, call ``load_state`` before this. In one process ``prepare`` makes no DDP model, and
    the strategy runs on one rank, at the end of ``accelerator.backward``.
    """
    inner, index = _prepared(accelerator, model)
    attachment = attached(accelerator, inner, strategy, options)
    name = f"gradlane_{index}" if index else "gradlane"

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        attachment.save(Path(folder) / name)

    def load(models: list[nn.Module], folder: str) -> None:
        start_empty = "call accelerator.load_state before attach_accelerate"
        load_from(attachment, Path(folder) / name, start_empty=start_empty)

    for handle in _hooks.pop(inner, []):
        handle.remove()  # of an attachment that was closed
    _hooks[inner] = [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]
    return attachment


def log_metrics(accelerator: Accelerator, attachment: Session, *, every: int = 1) -> None:
    """Log the metrics to the accelerator's trackers, every ``every`` steps.

    Call it after each micro-batch; it does nothing between the micro-batches of a step.
    """
    if every < 1:
        raise InvalidValue(f"every={every}; it counts steps, from 1 on")
    if accelerator.sync_gradients and attachment.step % every == 0:
        accelerator.log(attachment.metrics(), step=attachment.step)


def _prepared(accelerator: Accelerator, model: nn.Module) -> tuple[nn.Module, int]:
    """The DDP model, or the plain one of a single process; and its index among the models of the accelerator,
    by which it numbers its files."""
    if not isinstance(accelerator, Accelerator):
        raise WrongType(
            f"got a {type(accelerator).__name__}, not an Accelerator; write "
            "attach_accelerate(accelerator, model, strategy)"
        )
    found = uncompiled(model)  # a compiled module holds the one that has the gradients
    ddp = isinstance(found, DistributedDataParallel)
    one_process = not ddp and accelerator.distributed_type == DistributedType.NO
    if not ddp and not one_process and getattr(model, "_is_accelerate_prepared", False):
        raise WrongType(
            f"gradlane works on DDP models, and with distributed_type={accelerator.distributed_type.value} "
            f"prepare made a {type(found).__name__}; use it without FSDP, DeepSpeed and the like"
        )
    for index, known in enumerate(accelerator._models):  # the modules inside of DDP
        if (ddp and known is found.module) or (one_process and known in (found, model)):
            return found, index
    raise WrongState(
        f"this {type(model).__name__} is not what prepare returned; call model = accelerator.prepare(model) "
        "first, then attach_accelerate(accelerator, model, strategy)"
    )
