"""Keeps optimizers from using the gradients of a skipped step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Withheld:
    """Once ``on``, any ``torch.optim`` optimizer that is asked to step finds no gradients of this model: each
    parameter's are taken away once. What comes then may be a local step, under ``no_sync``.

    Parameters without a gradient are left alone, with their momentum, by every optimizer of torch. Gradients
    are taken away so late, not in backward, because a GradScaler must see that they are not finite.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._mine = frozenset(id(parameter) for parameter in parameters)
        self._bad: set[int] = set()  # those whose gradients are still to be taken away
        me = weakref.ref(self)  # torch keeps the hook; it must not keep us

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (living := me()) is not None and living.on:
                living._take_away(optimizer)

        self._handle = register_optimizer_step_pre_hook(before_step)

    @property
    def on(self) -> bool:
        return bool(self._bad)

    @on.setter
    def on(self, on: bool) -> None:
        self._bad = set(self._mine) if on else set()

    def _take_away(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._bad:
                    parameter.grad = None
                    self._bad.discard(id(parameter))

    def close(self) -> None:
        self._handle.remove()
