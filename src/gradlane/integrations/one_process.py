"""A framework that has started one process wraps no model in DDP: its ``backward`` is where gradients are
reduced then."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.strategy import Strategy
from ..ddp import attach
from ..session import Session
from ..session.one_process import OneProcess
from ..settings import Options

MARK = "_gradlane_alone"


def attached(accelerator: Any, model: nn.Module, strategy: Strategy | str, options: Options) -> Session:
    """To the DDP model of an Accelerator, or to the plain one of a single process."""
    if isinstance(model, DistributedDataParallel):
        return attach(model, strategy, scaler=accelerator.scaler, **options)
    alone = OneProcess(model, strategy, scaler=accelerator.scaler, **options)
    reduce_after_backward(accelerator, alone, lambda: bool(accelerator.sync_gradients))
    return alone


def reduce_after_backward(owner: Any, alone: OneProcess, synced: Callable[[], bool]) -> None:
    """Let ``owner.backward`` (an Accelerator's, or Fabric's) end with the work of the strategy, where
    ``synced`` says that a step is whole."""
    watched: list[tuple[OneProcess, Callable[[], bool]]] = vars(owner).setdefault(MARK, [])
    watched[:] = [pair for pair in watched if pair[0].is_open]
    watched.append((alone, synced))
    if "backward" in vars(owner):  # wrapped already
        return
    backward = owner.backward

    @wraps(backward)
    def and_reduce(*args: Any, **kwargs: Any) -> Any:
        answer = backward(*args, **kwargs)
        for each, is_whole in list(watched):
            each.backward_ended(synced=is_whole())
        return answer

    owner.backward = and_reduce
