"""The gradients of a skipped step: taken away, cleared, or still there when the next ones are added."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..torch_internals import sparse_values


class Leftover:
    """Knows for each parameter whether its gradient is that of a skipped step.

    Such a gradient is over when it is taken away, or when ``zero_grad`` has cleared it. torch tells nobody
    of the latter; so each parameter is looked at just before the next gradient is added to it.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        named = list(parameters)
        self._mine = {id(parameter): weakref.ref(parameter) for _, parameter in named}
        self._keys = {name: id(parameter) for name, parameter in named}
        self.bad: set[int] = set()
        self._looked_at: set[int] = set()
        self._culprit: int | None = None  # a parameter whose gradient is not finite
        self._handles: list[RemovableHandle] = []

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._mine

    def begin(self, names: list[str]) -> None:
        """All gradients are those of a skipped step; those of ``names`` are not finite."""
        self.end()
        self.bad = set(self._mine)
        self._culprit = next((self._keys[name] for name in names if name in self._keys), None)
        me = weakref.ref(self)
        for key, found in self._mine.items():
            parameter = found()
            if parameter is not None and parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(_before_adding, me, key)))  # type: ignore[no-untyped-call]

    def taken(self, parameter: Tensor) -> bool:
        """Whether its gradient is one of these; it is none any more."""
        if id(parameter) not in self.bad:
            return False
        self.bad.discard(id(parameter))
        return True

    def end(self) -> bool:
        """New gradients are here. Whether they were added to some that are not finite."""
        carried = self._culprit in self.bad and not self._cleared(self._culprit)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._looked_at.clear()
        self.bad, self._culprit = set(), None
        return carried

    def _cleared(self, key: int | None) -> bool:
        if key is None or key in self._looked_at:  # then it is not: it would be no ``bad`` one
            return False
        parameter = self._mine[key]()
        return parameter is None or parameter.grad is None or not _any(parameter.grad)

    def look(self, key: int) -> None:
        if key in self.bad and key not in self._looked_at:
            if self._cleared(key):
                self.bad.discard(key)
            self._looked_at.add(key)


def _before_adding(leftover: weakref.ref[Leftover], key: int, grad: Tensor) -> None:
    if (living := leftover()) is not None:
        living.look(key)


def _any(grad: Tensor) -> bool:
    return bool((sparse_values(grad) if grad.is_sparse else grad).count_nonzero())
