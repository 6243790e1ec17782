"""The mean of the weights of all ranks, written in place on all of them or on none."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..torch_internals import copy_each
from .drift import hashed, minority
from .layout import layout_of
from .roll_call import RollCall
from .step import Step


class _Copy:
    """Some weights side by side in one flat tensor, in fp32 or wider."""

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.layout = layout_of([f"weight{number}" for number in range(len(weights))], weights)
        self._weights = weights
        self.flat = torch.empty(sum(w.numel() for w in weights), dtype=dtype, device=weights[0].device)
        copy_each(self._views(self.flat), weights)

    def write_back(self, mean: Tensor) -> None:
        copy_each(self._weights, self._views(mean))

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [weight.numel() for weight in self._weights])
        return [part.view(weight.shape) for part, weight in zip(parts, self._weights, strict=True)]


@torch.no_grad()
def average_weights(
    step: Step,
    strategy: Strategy,
    weights: Sequence[Tensor],
    count: int,
    device: torch.device,
    own_error: Exception | None = None,
) -> None:
    """Replace the weights by their mean over the ranks of the step's lane.

    ``count`` says which averaging this is. The ranks compare it, and the shapes, before they send weights: of
    tensors of different sizes a backend makes garbage, or a crash. If anything fails, or a rank has an error
    of its own, this raises on all ranks and no weight has changed.
    """
    began = time.perf_counter()
    step.begin(strategy)
    weights = [weight.detach() for weight in weights]
    copies: list[_Copy] = []
    try:
        copies = _copies(weights) if own_error is None else []
    except Exception as error:  # noqa: BLE001  the other ranks must not wait for this one
        own_error = error
    shapes = [(str(weight.dtype), tuple(weight.shape)) for weight in weights]
    own = count, sum(weight.numel() for weight in weights), hashed(shapes)
    answers = []
    if RollCall("averaging", _objection, own_error).passes(step, own, device):
        for index, copy in enumerate(copies):
            is_last = index == len(copies) - 1
            answers.append(step.submit(strategy, copy.flat, copy.layout, index=index, is_last=is_last))
    if step.wait() is None:
        for copy, answer in zip(copies, answers, strict=True):
            copy.write_back(answer.wait())
    step.forget_buckets()  # the copies are freed: they may be elsewhere the next time
    failure = step.end(computed_at=began)
    if failure is not None:
        raise failure


def _copies(weights: Sequence[Tensor]) -> list[_Copy]:
    if not weights:
        raise InvalidValue(
            "there is no parameter that requires a gradient; pass model.parameters() or "
            "optimizer.param_groups, and a new generator for each call"
        )
    wide = [torch.promote_types(weight.dtype, torch.float32) for weight in weights]
    return [
        _Copy([weight for weight, its in zip(weights, wide, strict=True) if its == dtype], dtype)
        for dtype in dict.fromkeys(wide)
    ]


def _objection(table: Sequence[Sequence[int]]) -> str | None:
    counts, elements, shapes = zip(*table, strict=True)
    if len(set(counts)) > 1:
        came = ", ".join(f"rank {rank} at step {count}" for rank, count in enumerate(counts))
        return (
            f"the ranks do not average together: {came}. All ranks must take the same number of steps, and "
            "load the same step"
        )
    if others := minority(shapes):
        sizes = ", ".join(f"rank {rank} has {size} elements" for rank, size in enumerate(elements))
        return (
            f"rank {', '.join(map(str, others))} averages other parameters than the others ({sizes}); pass "
            "the same ones in the same order, with the same requires_grad, on all ranks"
        )
    return None
