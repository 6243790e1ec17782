"""Keeps optimizers from using the gradients of a skipped step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import WrongState
from ..kernels.finite import all_finite
from ..log import log
from ..torch_internals import current_backward
from .closures import Evaluated
from .leftover import Leftover

Called: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_living: weakref.WeakSet[Withheld] = weakref.WeakSet()
_hooked: list[tuple[weakref.ref[Withheld], tuple[Any, ...]]] = []


class Withheld:
    """Once ``on``, any ``torch.optim`` optimizer that is asked to step finds no gradients of this model: each
    parameter's are taken away once. What comes then may be a local step, under ``no_sync``.

    Parameters without a gradient are left alone, with their momentum, by every optimizer of torch. Gradients
    are taken away so late, not in backward, because a GradScaler must see that they are not finite. Where
    backward is in the optimizer's closure, they are taken away when the closure returns.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], synced: Callable[[], bool] = lambda: True
    ) -> None:
        self._leftover = Leftover(parameters)
        self._synced = synced
        self._warned = False
        self._skips = 0
        self._skipped: int | None = None  # which skip the last step was, if it was one
        self._evaluated: weakref.WeakKeyDictionary[Any, Evaluated] = weakref.WeakKeyDictionary()
        me = weakref.ref(self)  # torch keeps the hooks; they must not keep us

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> Called | None:
            return None if (living := me()) is None else living._before_step(optimizer, args, kwargs)

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (living := me()) is not None and (evaluated := living._evaluated.pop(optimizer, None)):
                evaluated.ended()

        self._handles = (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        )
        _forget_the_dead()
        _hooked.append((me, self._handles))
        _living.add(self)

    @property
    def on(self) -> bool:
        return bool(self._leftover.bad)

    def begin(self) -> bool:
        """Be off: a step begins. Whether its gradients were added to those of the last skipped one."""
        self._skipped = None
        return self._leftover.end()

    def withhold(self, names: list[str]) -> None:
        """Be on: the step was skipped, because of the gradients of ``names``."""
        self._skips += 1
        self._skipped = self._skips
        self._leftover.begin(names)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Called | None:
        if current_backward() is not None and self.has(optimizer) and self._synced():
            raise WrongState(_IN_BACKWARD)
        if self.on and not self._take_away(optimizer):
            self._look_at_copies(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure) or not self.has(optimizer):
            return None
        self._evaluated[optimizer] = evaluated = Evaluated(optimizer)
        closure = evaluated.watched(partial(self._evaluate, weakref.ref(optimizer), closure))
        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def _evaluate(
        self, optimizer: weakref.ref[Any], closure: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, bool]:
        """What the closure returns, and whether its backward was skipped."""
        before = self._skipped
        loss = closure(*args, **kwargs)
        skipped = self._skipped not in (None, before)
        if skipped:
            self._take_away(optimizer())
        return loss, skipped

    def has(self, optimizer: Any) -> bool:
        return any(parameter in self._leftover for parameter in _parameters(optimizer))

    def _take_away(self, optimizer: Any) -> bool:
        """Whether any was this model's."""
        mine = False
        for parameter in _parameters(optimizer):
            if parameter in self._leftover:
                mine = True
                if self._leftover.taken(parameter):
                    parameter.grad = None
        return mine

    def _look_at_copies(self, optimizer: Any) -> None:
        """Master weights that were copied by hand are no parameters of the model."""
        if self._warned or any(other.has(optimizer) for other in _living):
            return
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        if not all(map(all_finite, gradients)):
            self._warned = True
            log.warning(_COPIES, type(optimizer).__name__)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        _hooked[:] = [(me, handles) for me, handles in _hooked if handles is not self._handles]
        self._leftover.end()
        _living.discard(self)


def _forget_the_dead() -> None:
    """Those that were dropped and not closed. Not in a finalizer: torch goes through its hooks in every step
    of an optimizer, and one that is taken away meanwhile would end that."""
    for me, handles in list(_hooked):
        if me() is None:
            for handle in handles:
                handle.remove()
            _hooked.remove((me, handles))


def _parameters(optimizer: Any) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_IN_BACKWARD = (
    "an optimizer steps inside of backward, with this rank's own gradient: the mean of all ranks is not "
    "there before backward ends. Call optimizer.step() after backward; remove hooks that step "
    "(register_post_accumulate_grad_hook, _apply_optimizer_in_backward), or step under no_sync()"
)
_COPIES = (
    "an optimizer (%s) of weights that are no parameters of the model steps with gradients that are not "
    "finite, in a step that is skipped. If they are copies of the model's, made by hand, they are not "
    "withheld: ask attachment.skipped before you copy gradients and step"
)
