"""Buckets for a loop without DDP: which gradients travel together, and the buffer they travel in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.numbers import is_number
from ..errors import InvalidValue
from ..fsdp_internals import local
from ..torch_internals import assign_buckets, copy_each
from .layout import layout_of
from .tensor_parallel import pieces_of

DEFAULT_BUCKET_MB = 25.0  # DDP's


def checked_bucket_mb(bucket_mb: object) -> float:
    if not is_number(bucket_mb) or not 0 < bucket_mb < math.inf:
        raise InvalidValue(
            f"bucket_mb={bucket_mb!r} is not possible; use a finite number above 0, such as 25"
        )
    return float(bucket_mb)


def bytes_of(bucket_mb: float) -> int:
    return max(1, int(bucket_mb * 2**20))


class OwnBucket:
    """Some parameters, and the buffer that holds a copy of their gradients."""

    def __init__(
        self, indices: Sequence[int], names: Sequence[str], parameters: Sequence[Tensor], *, sparse: bool
    ) -> None:
        self._indices = indices  # of its parameters in the list of all
        self.pieces = pieces_of(parameters)
        """Of which of them other ranks have other pieces: tensor parallelism."""
        parameters = list(map(local, parameters))
        self.layout = layout_of(names, parameters)
        self._sparse = sparse
        # Keeps no parameter: the model can be collected.
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._flat = parameters[0].new_zeros(0 if sparse else sum(self._sizes))
        self._parts = [] if sparse else self._cut(self._flat)

    def filled(self, parameters: Sequence[Tensor]) -> Tensor:
        """A copy of the gradients; zeros for a missing one."""
        gradients = [_own_gradient(parameters[index]) for index in self._indices]
        if self._sparse:
            return _sparse_copy(gradients[0], parameters[self._indices[0]])
        targets, sources = [], []
        for part, gradient in zip(self._parts, gradients, strict=True):
            if gradient is None:
                part.zero_()
            else:
                targets.append(part)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        copy_each(targets, sources)
        return self._flat

    def spread(self, mean: Tensor, parameters: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        """Write the mean to the ``wanted`` gradients, in place where that is possible."""
        targets, sources = [], []
        for index, part in zip(self._indices, [mean] if self._sparse else self._cut(mean), strict=True):
            parameter = parameters[index]
            gradient = _own_gradient(parameter)
            if not wanted[index]:
                continue
            if self._sparse:
                parameter.grad = part
            elif gradient is None or gradient.is_sparse or _repeats(gradient):
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                local(parameter.grad).copy_(part)
            else:
                targets.append(gradient)
                sources.append(part)
        copy_each(targets, sources)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        return [
            part.view(shape) for part, shape in zip(torch.split(flat, self._sizes), self._shapes, strict=True)
        ]


def own_buckets(
    names: Sequence[str], parameters: Sequence[Tensor], sparse: Sequence[bool], limit: int
) -> list[OwnBucket]:
    """The last parameters first, because backward computes their gradients first. DDP's rule: one dtype in
    each bucket, closed as soon as it holds ``limit`` bytes, and a sparse gradient alone."""
    order = list(reversed(range(len(parameters))))
    groups = assign_buckets([local(parameters[i]) for i in order], limit, [sparse[i] for i in order])
    buckets = []
    for group in groups:
        indices = [order[index] for index in group]
        members = [parameters[i] for i in indices]
        buckets.append(OwnBucket(indices, [names[i] for i in indices], members, sparse=sparse[indices[0]]))
    return buckets


def _own_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of a gradient; None if there is no gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise InvalidValue(
            f"a gradient has the placements {gradient.placements}, its parameter has "  # type: ignore[attr-defined]
            f"{parameter.placements}; redistribute the gradient before it is reduced"  # type: ignore[attr-defined]
        )
    return local(gradient)


def _sparse_copy(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """With one entry per row, as an embedding's gradient has."""
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        rows = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, rows, parameter.shape, check_invariants=True)
    return gradient.clone() if gradient.is_sparse else gradient.to_sparse(1)


def _repeats(gradient: Tensor) -> bool:
    """Whether several elements share memory, as after ``expand``: such a gradient cannot be written to."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
    )
