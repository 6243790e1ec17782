"""Optimizers that run backward themselves, in a closure: what a skipped step does to theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFinite
from ..torch_internals import write_count


def closure_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``optimizer.step`` was called with a closure, as its hooks see the arguments. Accelerate passes
    ``None``."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


class ClosureStep:
    """One ``optimizer.step(closure)``.

    Most optimizers evaluate their closure once, before they change anything, and find no gradients if that
    backward was skipped. LBFGS evaluates many times and moves the weights in between, so its step is undone
    completely. Any other optimizer that has moved the weights before a skipped evaluation raises: nobody
    knows how to undo its step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._name = type(optimizer).__name__
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._write_counts = [write_count(parameter) for parameter in self._parameters]
        self._before = _Before(optimizer) if isinstance(optimizer, torch.optim.LBFGS) else None
        self._skipped = False

    def watched(self, closure: Callable[..., tuple[Any, bool]]) -> Callable[..., Any]:
        """The closure to pass to the optimizer; ``closure`` also returns whether its backward was skipped."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            moved = self._write_counts != [write_count(parameter) for parameter in self._parameters]
            try:
                loss, skipped = closure(*args, **kwargs)
            except BaseException:
                self._skipped = True
                self.ended()  # torch does not call the post hook after a step that raises
                raise
            if skipped:
                self._skipped = True
                if moved and self._before is None:
                    raise NonFinite(
                        f"{self._name} has moved the weights before its closure met a gradient that is not "
                        "finite, so that its step cannot be skipped; go back to a checkpoint. To skip such "
                        "steps run backward before optimizer.step(), and check attachment.skipped"
                    )
            return loss

        return evaluate

    def ended(self) -> None:
        """The optimizer's step is over."""
        if self._skipped and self._before is not None:
            self._before.restore()
        self._before, self._parameters = None, []  # nothing here may keep a model


class _Before:
    """Weights and state of an LBFGS before its step; small beside the history that it keeps."""

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
    return list(value) if isinstance(value, list) else value  # LBFGS never writes to the tensors of its lists
