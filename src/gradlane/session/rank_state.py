"""What a rank has of its own in local training, for checkpoints: position, weights, buffers, optimizer, and
the scale of its loss."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tree import entries_of, tree_of
from ..core.numbers import is_number
from ..errors import InvalidValue
from .local_position import Position
from .local_weights import LocalWeights
from .optimizer_state import load_optimizer, optimizer_state, refuse_buffers, refuse_misfit


class RankState:
    """It keeps neither model nor optimizer alive; without an optimizer there is no state."""

    def __init__(
        self, weights: LocalWeights, optimizer: torch.optim.Optimizer, scaler: Callable[[], Any]
    ) -> None:
        self._weights = weights
        self._scaler = scaler
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
            **self._scale(),
        }

    def _scale(self) -> dict[str, str]:
        """Of a GradScaler: each rank's has seen overflows of its own, and a framework saves rank 0's."""
        find = getattr(self._scaler(), "state_dict", None)
        state = {} if find is None else find()
        return {"scaler": json.dumps(state)} if state else {}  # it is empty if the scaler is disabled

    def refuse(self, state: Mapping[str, Any]) -> None:
        """Raise on a state that is damaged, or of another model or optimizer."""
        if state and (optimizer := self._optimizer()) is not None:
            Position.read(state["position"])
            _refuse_scale(state.get("scaler", "{}"))
            refuse_buffers(state.get("buffers", {}), self._weights.buffers())
            refuse_misfit(state, self._weights.parameters(), optimizer)

    def load(self, state: Mapping[str, Any]) -> None:
        """Without weights of its own, as after a change of the world, this rank continues from the anchor."""
        if "weights" in state:
            self._weights.load(state["weights"], state.get("buffers", {}))
        else:
            self._weights.show_agreed()
        if (optimizer := self._optimizer()) is not None:
            load_optimizer(optimizer, self._weights.parameters(), state["optimizer"])
        if "scaler" in state and self._scale():
            self._scaler().load_state_dict(json.loads(state["scaler"]))


def _refuse_scale(text: object) -> None:
    """A GradScaler takes whatever it is given, and would fail, or train with NaN, much later."""
    try:
        numbers = json.loads(str(text)).values()
    except (ValueError, AttributeError):
        numbers = [text]
    if not all(is_number(number) and number >= 0 for number in numbers):
        raise InvalidValue(f"its state of the GradScaler is damaged: {text}; use another checkpoint")


def cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """With copies of all tensors: training goes on with the originals."""
    return tree_of(
        (path, value.clone() if isinstance(value, Tensor) else value) for path, value in entries_of(state)
    )
