"""Strategies that work with the optimizer, ``LocalSteps`` and 1-bit Adam, in a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..feed.adam_moments import is_frozen, thaw
from ..feed.step_counter import checked_optimizer
from ..log import log
from ..session import Session
from ..session.local_training import LocalTraining
from ..settings import ScaledOptions
from ..strategies.schedule import After
from ..strategies.text import describe
from ..with_optimizer import (
    Attach,
    attach_with_optimizer,
    needs_optimizer,
    refuse_on_shards,
    sends_momentum,
)
from .models import is_fsdp2

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attach_for(
    model: nn.Module,
    strategy: Strategy,
    optimizer: object | None,
    *,
    attach_alone: Attach,
    give: str,
    **options: Unpack[ScaledOptions],
) -> Session:
    """Attach to a model of DDP or FSDP2, or to the plain model of a single process, with what the strategy
    does to the optimizer. ``give`` is how a user of this framework gives one."""
    if is_fsdp2(model):
        refuse_on_shards(strategy)
    if optimizer is None and needs_optimizer(strategy):
        raise InvalidValue(
            f"{describe(strategy, short=True)} works with the optimizer, and none was given; write {give}"
        )
    return attach_with_optimizer(model, optimizer, strategy, attach_alone=attach_alone, **options)


def steps_of(session: Session) -> int:
    """How many steps the optimizer has taken: local steps count rounds besides."""
    return session.local_steps if isinstance(session, LocalTraining) else session.step


def position_of(session: Session) -> dict[str, int]:
    """To compare two files of one checkpoint."""
    position = {"step": session.step}
    return position if session.gives == "gradients" else {**position, "local_steps": steps_of(session)}


def in_words(position: Mapping[str, int]) -> str:
    if "local_steps" in position:
        return f"local step {position['local_steps']}, round {position['step']}"
    return f"step {position['step']}"


def warn_of_clipping(strategy: Strategy, option: str, limit: float | None) -> None:
    """A framework clips what arrives. After the freeze of 1-bit Adam that is a momentum."""
    if isinstance(strategy, After) and sends_momentum(strategy) and limit:
        log.warning(
            "%s=%s clips gradients, and from step %d on the momentum that arrives in their place, which is "
            "not what the ranks remember then; switch it off: %s=0",
            option, limit, strategy.step, option,
        )  # fmt: skip


def forget_state(optimizer: object) -> None:
    """As before the first step: each rank has had a state of its own, or frozen moments."""
    found: torch.optim.Optimizer = checked_optimizer(optimizer)
    if is_frozen(found):
        thaw(found, lambda parameter: None)
    found.state.clear()
