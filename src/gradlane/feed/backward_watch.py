"""When the gradients of a DDP model become ready, seen without a hook of DDP."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..torch_internals import call_after_backward, current_backward, in_join


class BackwardWatch:
    """Calls ``ended`` at the end of each backward that DDP synchronises, after DDP has finished it.

    With ``all_parameters`` it notes when each gradient was ready; that costs some microseconds for each
    parameter. Without, it watches the one that was ready first. All ranks see the same backwards: DDP itself
    counts on it. A joined rank has none, so what happens in ``join`` is not seen.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        ended: Callable[[BackwardWatch], None],
        clock: Callable[[], float],
    ) -> None:
        """``ended`` is a method; its object is not kept."""
        self._clock = clock
        self.ready: list[tuple[str, float]] = []
        """The parameters of this backward in the order in which they were ready, and when."""
        self._ddp = weakref.ref(ddp)
        self._ended = weakref.WeakMethod(ended)
        self._backward: int | None = None
        self._parameters = {
            name: parameter
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ddp.parameters_to_ignore
        }
        self._handles: list[Any] = []
        self.all_parameters()

    def all_parameters(self) -> None:
        """From now on watch all."""
        self.stop()
        self._watch(list(self._parameters))

    def only_first(self) -> None:
        """From now on watch one parameter."""
        self.stop()
        self._watch([self.ready[0][0]])

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _watch(self, names: list[str]) -> None:
        self._handles = [
            self._parameters[name].register_post_accumulate_grad_hook(
                partial(_ready, weakref.ref(self), name)
            )
            for name in names
        ]

    def _note(self, name: str) -> None:
        ddp = self._ddp()
        if ddp is None or not ddp.require_backward_grad_sync or in_join(ddp):
            return
        backward = current_backward()
        if backward != self._backward:
            self._backward, self.ready = backward, []
            # DDP's own callback is queued later than this one; a callback that this one queues comes last.
            call_after_backward(lambda: call_after_backward(self._backward_ended))
        self.ready.append((name, self._clock()))

    def _backward_ended(self) -> None:
        if self._handles and (ended := self._ended()) is not None:
            ended(self)


def _ready(watch: weakref.ref[BackwardWatch], name: str, parameter: Tensor) -> None:
    """The parameter keeps this function, which must not keep the watch."""
    if (found := watch()) is not None:
        found._note(name)
