"""The gradients of a skipped step, until they are removed, cleared, or added to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..fsdp_internals import local
from ..kernels.finite import all_finite
from ..torch_internals import sparse_values

Find = Callable[[], "Tensor | None"]
"""A weak reference to a parameter, or what finds it."""


class SkippedGradients:
    """Knows for each parameter whether its gradient is that of a skipped step; true if any is.

    A gradient stops being one when it is removed, or when ``zero_grad`` clears it. torch does not report the
    latter, so each gradient is checked just before the next one is added to it.
    """

    def __init__(self, parameters: Iterable[tuple[str, Find]], *, watch_sums: bool) -> None:
        """``watch_sums``: autograd adds to the gradients, so that a hook sees what they are before."""
        self._parameters: dict[int, Find] = {}
        self._keys: dict[str, int] = {}
        for name, find in parameters:
            self._keys[name] = key = id(find())
            self._parameters[key] = find
        self._watch_sums = watch_sums
        self._skipped: set[int] = set()
        self._checked: set[int] = set()
        self._culprit: int | None = None  # a parameter whose gradient is not finite
        self._handles: list[RemovableHandle] = []

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._parameters

    def __bool__(self) -> bool:
        return bool(self._skipped)

    def begin(self, names: list[str]) -> None:
        """A step was skipped: every gradient is one of it, and those of ``names`` are not finite."""
        self.end()
        self._skipped = set(self._parameters)
        self._culprit = next((self._keys[name] for name in names if name in self._keys), None)
        reference = weakref.ref(self)
        for key, found in self._parameters.items():
            parameter = found()
            if self._watch_sums and parameter is not None and parameter.requires_grad:
                hook = partial(_before_adding, reference, key)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def take(self, parameter: Tensor) -> bool:
        """Whether its gradient is one of the skipped step; from now on it is not."""
        if id(parameter) not in self._skipped:
            return False
        self._skipped.discard(id(parameter))
        return True

    def end(self) -> bool:
        """New gradients are here. Whether they were added to gradients that are not finite."""
        carried = self._culprit in self._skipped and not self._cleared(self._culprit)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._checked.clear()
        self._skipped, self._culprit = set(), None
        return carried

    def any_not_finite(self) -> bool:
        """Whether a gradient of the skipped step is still there, and not finite."""
        found = (self._parameters[key]() for key in self._skipped)
        gradients = (parameter.grad for parameter in found if parameter is not None)
        return not all(all_finite(local(grad)) for grad in gradients if grad is not None)

    def _cleared(self, key: int | None) -> bool:
        if key is None or key in self._checked:  # a cleared one is no more in ``_skipped`` after its check
            return False
        parameter = self._parameters[key]()
        return parameter is None or parameter.grad is None or not _any(parameter.grad)

    def check(self, key: int) -> None:
        """Before a gradient is added to this parameter's."""
        if key in self._skipped and key not in self._checked:
            if self._cleared(key):
                self._skipped.discard(key)
            self._checked.add(key)


def _before_adding(gradients: weakref.ref[SkippedGradients], key: int, grad: Tensor) -> None:
    if (found := gradients()) is not None:
        found.check(key)


def _any(grad: Tensor) -> bool:
    return bool((sparse_values(grad) if grad.is_sparse else local(grad)).count_nonzero())
