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
from .resume import go_on

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
    rank, into the folder ``gradlane`` of the checkpoint, and ``load_state`` reads it. To load a checkpoint
    that has none, call ``load_state`` before this. In one process, where ``prepare`` makes no DDP model, the
    strategy works on one rank, at the end of ``accelerator.backward``.
    """
    inner, place = _prepared(accelerator, model)
    attachment = attached(accelerator, inner, strategy, options)
    name = f"gradlane_{place}" if place else "gradlane"

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        attachment.save(Path(folder) / name)

    def load(models: list[nn.Module], folder: str) -> None:
        without = "call accelerator.load_state before attach_accelerate"
        go_on(attachment, Path(folder) / name, without=without)

    for handle in _hooks.pop(inner, []):
        handle.remove()  # of an attachment that was closed
    _hooks[inner] = [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]
    return attachment


def log_metrics(accelerator: Accelerator, attachment: Session, *, every: int = 1) -> None:
    """The metrics to the accelerator's trackers, in every step that ``every`` divides.

    Call it at the end of each step; between the micro-batches of one step it does nothing.
    """
    if every < 1:
        raise InvalidValue(f"every={every}; it counts steps, from 1 on")
    if accelerator.sync_gradients and attachment.step % every == 0:
        accelerator.log(attachment.metrics(), step=attachment.step)


def _prepared(accelerator: Accelerator, model: nn.Module) -> tuple[nn.Module, int]:
    """The DDP model, or the plain one of a single process; and its place among the models of the accelerator,
    which numbers its files by it."""
    if not isinstance(accelerator, Accelerator):
        raise WrongType(
            f"got a {type(accelerator).__name__}, not an Accelerator; write "
            "attach_accelerate(accelerator, model, strategy)"
        )
    found = uncompiled(model)  # a compiled module holds the one that has the gradients
    ddp = isinstance(found, DistributedDataParallel)
    alone = not ddp and accelerator.distributed_type == DistributedType.NO
    if not ddp and not alone and getattr(model, "_is_accelerate_prepared", False):
        raise WrongType(
            f"gradlane works on DDP models, and with distributed_type={accelerator.distributed_type.value} "
            f"prepare made a {type(found).__name__}; use it without FSDP, DeepSpeed and the like"
        )
    for place, known in enumerate(accelerator._models):  # which has what is inside of DDP
        if (ddp and known is found.module) or (alone and known in (found, model)):
            return found, place
    raise WrongState(
        f"this {type(model).__name__} is not what prepare returned; call model = accelerator.prepare(model) "
        "first, then attach_accelerate(accelerator, model, strategy)"
    )
