"""The weights and buffers of a model in local training: this rank's own, and those that all agreed on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..core.memory import Memory
from ..errors import WrongState
from ..torch_internals import copy_each


class LocalWeights:
    """Trained parameters and floating-point buffers. It keeps no model alive.

    ``anchor`` and ``agreed_buffers`` hold what the ranks agreed on last.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], anchor: Memory, buffers: Memory) -> None:
        self._module = weakref.ref(module)
        self._names = frozenset(names)
        self._anchor = anchor
        self._agreed_buffers = buffers
        self.showing_agreed = False
        """Whether the model has the agreed weights for a while, instead of this rank's own."""

    def parameters(self) -> dict[str, nn.Parameter]:
        module = self._module()
        if module is None:
            raise WrongState("the model is gone; local steps end with it")
        return {name: p for name, p in module.named_parameters() if name in self._names}

    def buffers(self) -> dict[str, Tensor]:
        module = self._module()
        named = () if module is None else module.named_buffers()
        return {name: buffer for name, buffer in named if buffer.is_floating_point() and buffer.numel()}

    def make_anchor(self) -> None:
        """The weights of now, which are the same on all ranks."""
        self._anchor.load_state_dict(anchor_of(self.parameters()))

    @torch.no_grad()
    def show_agreed(self) -> None:
        """Give the model what the ranks agreed on last. Without a round so far, buffers stay as they are."""
        parameters = self.parameters()
        copy_each(
            [parameter.detach() for parameter in parameters.values()],
            [self._agreed(name, parameter) for name, parameter in parameters.items()],
        )
        self.show_agreed_buffers()

    def show_agreed_buffers(self) -> None:
        for name, buffer in self.buffers().items():
            if (agreed := self._agreed_buffers.get(name)) is not None:
                buffer.copy_(agreed.view_as(buffer))

    @torch.no_grad()
    def take_over(self, names: Iterable[str], own_share: float) -> None:
        """Agreed weights for these parameters, mixed with this rank's own."""
        parameters = self.parameters()
        for name in names:
            parameter, agreed = parameters[name], self._agreed(name, parameters[name])
            parameter.copy_(agreed.lerp(parameter.to(agreed.dtype), own_share) if own_share else agreed)

    @contextmanager
    def agreed_for_a_while(self) -> Iterator[None]:
        with torch.inference_mode(False):  # the block may end outside of the mode in which it began
            tensors = [*(p.detach() for p in self.parameters().values()), *self.buffers().values()]
            own = [tensor.clone() for tensor in tensors]
            self.show_agreed()
        self.showing_agreed = True
        try:
            yield
        finally:
            self.showing_agreed = False
            copy_each(tensors, own)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        parameters, current = self.parameters(), self.buffers()
        copy_each([p.detach() for p in parameters.values()], [weights[name] for name in parameters])
        copy_each([current[name] for name in buffers], list(buffers.values()))

    def _agreed(self, name: str, parameter: Tensor) -> Tensor:
        anchor = self._anchor.tensor(name)
        assert anchor is not None  # it holds every trained parameter
        return torch.view_as_complex(anchor) if parameter.is_complex() else anchor


def anchor_of(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the weights, in fp32 or wider; complex numbers as pairs."""

    def wide(weights: Tensor) -> Tensor:
        real = torch.view_as_real(weights) if weights.is_complex() else weights
        return real.detach().to(torch.promote_types(real.dtype, torch.float32), copy=True).contiguous()

    return {name: wide(parameter) for name, parameter in trained.items()}
