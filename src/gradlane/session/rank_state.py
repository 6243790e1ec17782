"""What a rank has of its own in local training, for checkpoints: position, weights, buffers, optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tree import entries_of, tree_of
from .local_position import Position
from .local_weights import LocalWeights
from .optimizer_state import load_optimizer, optimizer_state, refuse_misfit


class RankState:
    """It keeps neither model nor optimizer alive; without an optimizer there is no state."""

    def __init__(self, weights: LocalWeights, optimizer: torch.optim.Optimizer) -> None:
        self._weights = weights
        self._optimizer = weakref.ref(optimizer)

    def collect(self, position: Position) -> dict[str, Any]:
        """The tensors themselves, not copies."""
        if (optimizer := self._optimizer()) is None:
            return {}
        parameters = self._weights.parameters()
        return {
            "position": str(position),
            "weights": {name: parameter.detach() for name, parameter in parameters.items()},
            "buffers": self._weights.buffers(),
            "optimizer": optimizer_state(optimizer, parameters),
        }

    def refuse(self, state: Mapping[str, Any]) -> None:
        """Raise on a state that is damaged, or of another model or optimizer."""
        if state and (optimizer := self._optimizer()) is not None:
            Position.read(state["position"])
            refuse_misfit(state, self._weights.parameters(), optimizer)

    def load(self, state: Mapping[str, Any]) -> None:
        """Without weights of its own, as after a change of the world, this rank continues from the anchor."""
        if "weights" in state:
            self._weights.load(state["weights"], state.get("buffers", {}))
        else:
            self._weights.show_agreed()
        if (optimizer := self._optimizer()) is not None:
            load_optimizer(optimizer, self._weights.parameters(), state["optimizer"])


def cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """With copies of all tensors: training goes on with the originals."""
    return tree_of(
        (path, value.clone() if isinstance(value, Tensor) else value) for path, value in entries_of(state)
    )
