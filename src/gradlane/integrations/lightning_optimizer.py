"""The one optimizer of a LightningModule, for strategies that work with it."""

from __future__ import annotations

from typing import Any

from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..strategies.schedule import After
from ..strategies.text import describe
from ..with_optimizer import needs_optimizer
from .with_optimizer import warn_of_clipping


def only_optimizer(trainer: Any, strategy: Strategy) -> object | None:
    """None for a strategy that needs no optimizer."""
    if not needs_optimizer(strategy):
        return None
    found: list[object] = trainer.optimizers
    name = describe(strategy, short=True)
    if len(found) != 1:
        raise InvalidValue(
            f"{name} works with one optimizer, and configure_optimizers has returned {len(found)}; return "
            "one, with a parameter group for each part of the module"
        )
    if isinstance(strategy, After) and strategy.refresh is not None and trainer.scaler is None:
        raise InvalidValue(
            f"{name} has refresh={strategy.refresh}, and Lightning runs backward inside of "
            "optimizer.step(closure), when it is too late to tell whether a step is a refresh; leave it out"
        )
    warn_of_clipping(strategy, "gradient_clip_val", trainer.gradient_clip_val)
    return found[0]
