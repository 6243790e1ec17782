"""Keeps optimizers from using the gradients of a skipped step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import WrongState
from ..fsdp_internals import local
from ..kernels.finite import all_finite
from ..log import log
from ..torch_internals import current_backward
from .optimizer_closures import ClosureStep
from .skipped_gradients import Find, SkippedGradients

Arguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_open: weakref.WeakSet[OptimizerHooks] = weakref.WeakSet()
_registered: list[tuple[weakref.ref[OptimizerHooks], tuple[Any, ...]]] = []


class OptimizerHooks:
    """After a skipped step, the next optimizer.step() sees grad=None for every parameter of this model.

    torch's optimizers leave a parameter without gradient alone, with its momentum. The gradient is removed
    as late as that, not in backward, because a GradScaler must see that it is not finite. If backward runs in
    the optimizer's closure, the gradients are removed when the closure returns. Each gradient is removed
    once: the next one may come from a local step, under ``no_sync``.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Find]],
        synced: Callable[[], bool] = lambda: True,
        *,
        adds_means: bool = False,
        finish_step: Callable[[], None] = lambda: None,
    ) -> None:
        """``finish_step`` ends a step whose end was postponed: whether it is skipped must be known now."""
        self.adds_means = adds_means
        """Whether the mean of a step is added to earlier gradients, as FSDP does. DDP takes the mean of sums,
        so that what is not finite stays in its buckets."""
        self._gradients = SkippedGradients(parameters, watch_sums=not adds_means)
        self._synced = synced
        self._finish_step = finish_step
        self._warned = False
        self._skips = 0
        self._last_skip: int | None = None  # the number of the skip if the last step was skipped
        self._closure_steps: weakref.WeakKeyDictionary[Any, ClosureStep] = weakref.WeakKeyDictionary()
        reference = weakref.ref(self)  # torch keeps the hooks; they must not keep this object

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> Arguments | None:
            hooks = reference()
            return None if hooks is None else hooks._before_step(optimizer, args, kwargs)

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            hooks = reference()
            if hooks is not None and (step := hooks._closure_steps.pop(optimizer, None)) is not None:
                step.ended()

        self._handles = (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        )
        _remove_hooks_of_collected()
        _registered.append((reference, self._handles))
        _open.add(self)

    def begin_step(self) -> bool:
        """Withhold nothing any more. Whether gradients were added to those of the skipped step."""
        self._last_skip = None
        spoiled = self.adds_means and self._gradients.any_not_finite()
        return self._gradients.end() or spoiled

    def withhold(self, names: list[str]) -> None:
        """The step is skipped because the gradients of ``names`` are not finite."""
        self._skips += 1
        self._last_skip = self._skips
        self._gradients.begin(names)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Arguments | None:
        if current_backward() is not None and self.concerns(optimizer) and self._synced():
            raise WrongState(_IN_BACKWARD)
        self._finish_step()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # A closure may add to the gradients: they stay until it returns, so that its step is skipped too.
        stay = self.adds_means and callable(closure)
        if self._gradients and not stay and not self._remove(optimizer):
            self._check_copies(optimizer)
        if not callable(closure) or not self.concerns(optimizer):
            return None
        self._closure_steps[optimizer] = step = ClosureStep(optimizer)
        closure = step.watched(partial(self._evaluate, weakref.ref(optimizer), closure))
        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def _evaluate(
        self, optimizer: weakref.ref[Any], closure: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, bool]:
        """What the closure returns, and whether its backward was skipped."""
        before = self._last_skip
        loss = closure(*args, **kwargs)
        self._finish_step()
        skipped = self._last_skip not in (None, before)
        if skipped or (self.adds_means and self._gradients):
            self._remove(optimizer())
        return loss, skipped

    def concerns(self, optimizer: Any) -> bool:
        """Whether the optimizer has a parameter of this model."""
        return any(parameter in self._gradients for parameter in _parameters(optimizer))

    def _remove(self, optimizer: Any) -> bool:
        """Remove the withheld gradients. Whether the optimizer has a parameter of this model."""
        concerned = False
        for parameter in _parameters(optimizer):
            if parameter in self._gradients:
                concerned = True
                if self._gradients.take(parameter):
                    parameter.grad = None
        return concerned

    def _check_copies(self, optimizer: Any) -> None:
        """Warn once of an optimizer that has hand-made copies of the weights: nobody withholds those."""
        if self._warned or any(other.concerns(optimizer) for other in _open):
            return
        gradients = [local(p.grad) for p in _parameters(optimizer) if p.grad is not None]
        if not all(map(all_finite, gradients)):
            self._warned = True
            log.warning(_COPIES, type(optimizer).__name__)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        _registered[:] = [entry for entry in _registered if entry[1] is not self._handles]
        self._gradients.end()
        _open.discard(self)


def _remove_hooks_of_collected() -> None:
    """Of those that were collected and never closed. Not in a finalizer: torch iterates over its hooks in
    every optimizer step, and removing one meanwhile would break that."""
    for reference, handles in list(_registered):
        if reference() is None:
            for handle in handles:
                handle.remove()
            _registered.remove((reference, handles))


def _parameters(optimizer: Any) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_IN_BACKWARD = (
    "an optimizer steps inside of backward, with this rank's own gradient: the mean of all ranks is not "
    "there before backward ends. Call optimizer.step() after backward; remove hooks that step "
    "(register_post_accumulate_grad_hook, _apply_optimizer_in_backward), or step under no_sync()"
)
_COPIES = (
    "an optimizer (%s) steps with gradients that are not finite, in a step that is skipped, and its weights "
    "are not parameters of the model. If they are copies of the model's weights, made by hand, nothing keeps "
    "them from these gradients: check attachment.skipped before you copy gradients and step"
)
