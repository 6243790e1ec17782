"""Frameworks that run one process do not wrap the model in DDP. There the strategy runs after their
``backward``."""

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

MARK = "_gradlane_one_process"


def attached(accelerator: Any, model: nn.Module, strategy: Strategy | str, options: Options) -> Session:
    """Attach to the DDP model of an Accelerator, or to the plain model of a single process."""
    if isinstance(model, DistributedDataParallel):
        return attach(model, strategy, scaler=accelerator.scaler, **options)
    session = OneProcess(model, strategy, scaler=accelerator.scaler, **options)
    reduce_after_backward(accelerator, session, lambda: bool(accelerator.sync_gradients))
    return session


def reduce_after_backward(owner: Any, session: OneProcess, synced: Callable[[], bool]) -> None:
    """Make ``owner.backward`` (of an Accelerator or Fabric) run the strategy at its end.

    ``synced`` says whether this backward is the last one of a step.
    """
    sessions: list[tuple[OneProcess, Callable[[], bool]]] = vars(owner).setdefault(MARK, [])
    sessions[:] = [pair for pair in sessions if pair[0].is_open]
    sessions.append((session, synced))
    if "backward" in vars(owner):  # wrapped already
        return
    backward = owner.backward

    @wraps(backward)
    def and_reduce(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        for each, is_synced in list(sessions):
            each.backward_ended(synced=is_synced())
        return result

    owner.backward = and_reduce
