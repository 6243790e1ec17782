"""Gradients of a model that travel as one bucket, in a loop without DDP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_internals import assign_buckets, copy_each
from .base import layout_of


class Parcel:
    """Which parameters it holds, and the room in which their gradients lie side by side."""

    def __init__(
        self, places: Sequence[int], names: Sequence[str], parameters: Sequence[Tensor], *, sparse: bool
    ) -> None:
        self.places = places  # of its parameters in the list of all
        self.layout = layout_of(names, parameters)
        self.sparse = sparse
        # The parameters themselves are not kept: the model must be free to go.
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._flat = parameters[0].new_zeros(0 if sparse else sum(self._sizes))
        self._parts = [] if sparse else self._cut(self._flat)

    def filled(self, parameters: Sequence[Tensor]) -> Tensor:
        """A copy of all their gradients; a missing one counts as zeros."""
        gradients = [parameters[place].grad for place in self.places]
        if self.sparse:
            return _sparse_copy(gradients[0], parameters[self.places[0]])
        into, found = [], []
        for part, gradient in zip(self._parts, gradients, strict=True):
            if gradient is None:
                part.zero_()
            else:
                into.append(part)
                found.append(gradient.to_dense() if gradient.is_sparse else gradient)
        copy_each(into, found)
        return self._flat

    def spread(self, mean: Tensor, parameters: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        """The mean into the ``wanted`` gradients, in place where there is one that can be written to."""
        into, found = [], []
        for place, part in zip(self.places, [mean] if self.sparse else self._cut(mean), strict=True):
            parameter = parameters[place]
            gradient = parameter.grad
            if not wanted[place]:
                continue
            if self.sparse:
                parameter.grad = part
            elif gradient is None or gradient.is_sparse or _repeats(gradient):
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(part)
            else:
                into.append(gradient)
                found.append(part)
        copy_each(into, found)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [
            part.view(shape) for part, shape in zip(torch.split(flat, self._sizes), self._shapes, strict=True)
        ]


def parcels(
    names: Sequence[str], parameters: Sequence[Tensor], sparse: Sequence[bool], limit: int
) -> list[Parcel]:
    """The last parameters first, as their gradients come in backward. DDP's rule: one dtype in each, full as
    soon as it holds ``limit`` bytes, and one parameter alone where the gradient is sparse."""
    order = list(reversed(range(len(parameters))))
    groups = assign_buckets([parameters[place] for place in order], limit, [sparse[place] for place in order])
    found = []
    for group in groups:
        places = [order[index] for index in group]
        held = [parameters[place] for place in places]
        found.append(Parcel(places, [names[place] for place in places], held, sparse=sparse[places[0]]))
    return found


def _sparse_copy(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """With rows as its entries, which is how an embedding gives it."""
    if gradient is None:
        where = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        rows = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(where, rows, parameter.shape, check_invariants=True)
    return gradient.clone() if gradient.is_sparse else gradient.to_sparse(1)


def _repeats(gradient: Tensor) -> bool:
    """Made by ``expand``: several elements in one place cannot be written to."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
    )
