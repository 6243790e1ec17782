"""Counts the steps of an optimizer, also those that a GradScaler leaves out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidValue, WrongState, WrongType
from ..torch_internals import current_backward, steps_in_backward
from .loss_scale import Scaler
from .optimizer_closures import closure_in


class StepCounter:
    """Calls ``after_step`` once for every step of the optimizer, ``before_step`` at its begin, with whether
    a closure is to compute the gradients.

    A GradScaler that has seen an overflow does not call the optimizer, and other ranks' scalers may. So a
    step of the scaler counts like a step of the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: Scaler | None,
        before_step: Callable[[bool], None],
        after_step: Callable[[], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._after_step = after_step
        self._before_step = before_step
        self._scaler: Any = None
        self._in_scaler = False
        own = weakref.ref(self)  # the optimizer keeps its hooks; they must not keep this object

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (counter := own()) is not None:
                counter._begin(closure_in(args, kwargs))

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (counter := own()) is not None and not counter._in_scaler:
                counter._after_step()

        self._handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        self.scaler = scaler

    def _begin(self, closure: bool) -> None:
        if current_backward() is not None:
            raise WrongState(
                "an optimizer steps inside of backward; with local steps call optimizer.step() after backward"
            )
        if not self._in_scaler:
            self._before_step(closure)

    @property
    def scaler(self) -> Scaler | None:
        return self._scaler  # type: ignore[no-any-return]

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        if self._scaler is not None:
            vars(self._scaler).pop("step", None)
        self._scaler = scaler
        if scaler is None:
            return
        original, own = type(scaler).step, weakref.ref(self)

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            counter = own()
            if counter is None or optimizer is not counter._optimizer():
                return original(scaler, optimizer, *args, **kwargs)
            # Before the scaler looks for an overflow: then all ranks find it, or none.
            counter._before_step(False)  # scalers take no closure
            counter._in_scaler = True
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                counter._in_scaler = False
            counter._after_step()
            return result

        vars(scaler)["step"] = step

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.scaler = None


def checked_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer that takes the steps; a framework may have wrapped it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # its import takes long, and warns
        raise WrongType(
            "a ZeroRedundancyOptimizer brings the weights of all ranks together in every step, so that none "
            "can train alone; use a plain optimizer"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    raise WrongType(
        f"local_steps counts the steps of a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the "
        "optimizer itself"
    )


def refuse_uncounted(optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer of another model, and one whose steps nobody can count."""
    theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in theirs for parameter in trained.values()):
        raise InvalidValue("the optimizer has no parameter of this model; pass the one that trains it")
    for name, parameter in trained.items():
        if steps_in_backward(parameter):
            raise WrongState(
                f"{name} has an optimizer that steps in backward (_apply_optimizer_in_backward); with local "
                "steps call optimizer.step() after backward"
            )
