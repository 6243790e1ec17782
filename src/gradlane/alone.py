"""One process, without DDP: the same strategy, checkpoints and metrics, and nothing to send."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .core.strategy import Strategy
from .lane.one_rank import OneRank
from .log import log
from .reducer import Reducer
from .settings import ScaledOptions
from .torch_internals import call_after_backward, current_backward

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Alone(Reducer):
    """A strategy at work on the plain module of a framework that has started one process.

    The gradient goes through the strategy on one rank: what it rounds is rounded, what it keeps is kept, its
    noise is added, a step that is not finite is skipped. So a script that was written for many is tried out
    with all that it has, and its checkpoints can be loaded by any number of ranks.
    """

    kind = "attachment"
    again = "attach again"

    def __init__(self, model: nn.Module, strategy: Strategy | str, **options: Unpack[ScaledOptions]) -> None:
        super().__init__(model, strategy, group=OneRank(), **options)
        self._touched = False  # a gradient has come since the last backward ended
        self._backward: int | None = None  # at whose end the gradients will be reduced
        me = weakref.ref(self)

        def came(parameter: Tensor) -> None:
            if (living := me()) is not None:
                living._touched = True

        self._came = _on_gradients(model, came)
        log.warning("one process: nothing is sent. For more: torchrun --nproc-per-node 2, or two devices")

    def backward_ended(self, *, synced: bool = True) -> None:
        """Reduce what has come, as DDP does in its own backward; not in the middle of an accumulation."""
        touched, self._touched = self._touched, False
        if touched and synced and not self._closed:
            self.reduce()

    def after_every_backward(self) -> None:
        """For loops of one's own, where nobody tells when backward has ended: autograd does."""
        me = weakref.ref(self)

        def queue(parameter: Tensor) -> None:
            living, backward = me(), current_backward()
            if living is not None and living._backward != backward:
                living._backward = backward
                call_after_backward(living.backward_ended)

        model = self._module()
        assert model is not None
        self._came += _on_gradients(model, queue)

    def close(self) -> None:
        super().close()
        for handle in self._came:
            handle.remove()
        self._came = []


def _on_gradients(model: nn.Module, call: Callable[[Tensor], None]) -> list[RemovableHandle]:
    return [
        parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
