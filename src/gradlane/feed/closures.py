"""Optimizers that run backward themselves: what is left of a step whose closure met a skipped one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFinite
from ..torch_internals import write_count


class Evaluated:
    """One ``optimizer.step(closure)`` under way.

    Most optimizers evaluate once, before they change anything, and find no gradients if that was skipped.
    LBFGS goes on from evaluation to evaluation and moves the weights in between, so the whole of its step is
    undone. Of an optimizer of one's own nobody knows how: if it has moved the weights already this raises.
    """

    def __init__(self, optimizer: Any) -> None:
        self._name = type(optimizer).__name__
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._versions = [write_count(parameter) for parameter in self._parameters]
        self._before = _Before(optimizer) if isinstance(optimizer, torch.optim.LBFGS) else None
        self._skipped = False

    def watched(self, closure: Callable[..., tuple[Any, bool]]) -> Callable[..., Any]:
        """The closure for the optimizer; the given one also says whether it met a skipped step."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            moved = self._versions != [write_count(parameter) for parameter in self._parameters]
            try:
                loss, skipped = closure(*args, **kwargs)
            except BaseException:
                self._skipped = True
                self.ended()  # torch does not call us after a step that raises
                raise
            if skipped:
                self._skipped = True
                if moved and self._before is None:
                    raise NonFinite(
                        f"{self._name} has moved the weights before its closure met a gradient that is not "
                        "finite, so that its step cannot be skipped; go back to a checkpoint. To skip such "
                        "steps run backward before optimizer.step(), and ask attachment.skipped"
                    )
            return loss

        return evaluate

    def ended(self) -> None:
        """The optimizer's step is over."""
        if self._skipped and self._before is not None:
            self._before.restore()
        self._before, self._parameters = None, []  # nothing here may keep a model


class _Before:
    """Weights and state of an LBFGS before its step; little beside the history that it keeps."""

    def __init__(self, optimizer: torch.optim.LBFGS) -> None:
        self._optimizer = optimizer
        self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {
            parameter: {name: _copied(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, weights in self._weights:
            parameter.copy_(weights)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value  # its tensors are never written to
