"""One process, without DDP: the same strategy, checkpoints and metrics, and nothing to send."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..core.strategy import Strategy
from ..lane.one_rank import OneRank
from ..log import log
from ..settings import ScaledOptions, Settings
from ..torch_internals import call_after_backward, current_backward
from .own_loop import OwnLoop

if TYPE_CHECKING:
    from typing_extensions import Unpack


def warn_of_one_process() -> None:
    log.warning("one process: nothing is sent. For more: torchrun --nproc-per-node 2, or two devices")


class OneProcess(OwnLoop):
    """A strategy at work on the plain module of a framework that has started one process.

    The gradient goes through the strategy on one rank: it is rounded, its residual is kept, noise is added,
    and a step that is not finite is skipped. So a script for many processes can be tried in one, and any
    number of ranks can load its checkpoints.
    """

    reopen = "attach again"

    def __init__(self, model: nn.Module, strategy: Strategy | str, **options: Unpack[ScaledOptions]) -> None:
        super().__init__(model, strategy, Settings(**options), group=OneRank())
        self._new_gradient = False  # since the end of the last backward
        self._reduced_after: int | None = None  # the backward at whose end the gradients are reduced
        reference = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            if (own := reference()) is not None:
                own._new_gradient = True

        self._handles = _on_gradients(model, on_gradient)
        warn_of_one_process()

    def backward_ended(self, *, synced: bool = True) -> None:
        """Reduce the new gradients, as DDP does in its own backward; not in the middle of an accumulation."""
        new, self._new_gradient = self._new_gradient, False
        if new and synced and not self._closed:
            self.reduce()

    def after_every_backward(self) -> None:
        """Let autograd call ``backward_ended``, for loops in which nobody else does."""
        reference = weakref.ref(self)

        def queue(parameter: Tensor) -> None:
            own, backward = reference(), current_backward()
            if own is not None and own._reduced_after != backward:
                own._reduced_after = backward
                call_after_backward(own.backward_ended)

        model = self._module()
        assert model is not None
        self._handles += _on_gradients(model, queue)

    def close(self) -> None:
        super().close()
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _on_gradients(model: nn.Module, call: Callable[[Tensor], None]) -> list[RemovableHandle]:
    return [
        parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
