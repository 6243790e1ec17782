"""Frameworks that run one process do not wrap the model in DDP. There the strategy runs after their
``backward``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from ..core.strategy import Strategy
from ..session import Session
from ..session.one_process import OneProcess
from ..settings import Options
from .models import warn_of_ignored_plugin
from .with_optimizer import attach_for

MARK = "_gradlane_one_process"


def attached(
    accelerator: Any,
    model: nn.Module,
    strategy: Strategy,
    optimizer: object | None,
    *,
    give: str,
    options: Options,
) -> Session:
    """Attach to the model of an Accelerator, of DDP or FSDP2, or to the plain model of a single process."""
    scaler = accelerator.scaler
    warn_of_ignored_plugin(model)

    def alone(strategy: Strategy) -> Session:
        session = OneProcess(model, strategy, scaler=scaler, **options)
        reduce_after_backward(accelerator, session, lambda: bool(accelerator.sync_gradients))
        return session

    return attach_for(model, strategy, optimizer, attach_alone=alone, give=give, scaler=scaler, **options)


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
