"""What a strategy must be before it may work on a model: asked by all ranks, refused by all."""

from __future__ import annotations

from torch import nn

from .agree.compare import objection
from .core.one_model import refuse_foreign
from .core.ownership import Ownership
from .core.strategy import Strategy, check_world
from .core.unsaved_state import refuse_unsaved_state
from .errors import GradlaneError


def objection_to(
    strategy: Strategy, model: nn.Module | None, world: int, own: Ownership | None = None
) -> GradlaneError | None:
    """What speaks against it on this rank; ``own`` is where it may be at work already."""
    return objection(
        lambda: refuse_unsaved_state(strategy),
        lambda: refuse_foreign(strategy, model, own),
        lambda: check_world(strategy, world),
    )
