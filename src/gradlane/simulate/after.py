"""The end of a simulated step: results must be equal on all ranks, and buffers are overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..core.strategy import Strategy, parts
from ..errors import RanksDisagree
from ..torch_internals import sparse_values

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensors: Iterable[Tensor]) -> None:
    """Fill the tensors with NaN, or -1, so that a strategy which keeps one beyond its step is noticed.

    On a network the next step overwrites them, with different values on every rank.
    """
    for tensor in tensors:
        if tensor.is_sparse:
            poison([sparse_values(tensor)])
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        elif tensor.dtype != torch.bool:
            tensor.fill_(
                255 if tensor.dtype == torch.uint8 else -1
            )  # bytes of a message: read as floats they are NaN


def check_equal_results(
    results: Sequence[Mapping[str, Tensor]], strategies: Sequence[Strategy], step: int, asked: bool
) -> None:
    """Raise ``RanksDisagree`` if results differ between ranks, unless the strategy says so: ``Noop``.

    ``asked``: a rank has awaited a collective in this step.
    """
    if any(not part.alike for strategy in strategies for part in parts(strategy)):
        return
    for rank, result in enumerate(results):
        for name, value in result.items():
            if not same_bits(value, results[0][name]):
                why = "decide by step, names and shapes, never by a rank's own values"
                if not asked:
                    why = "no rank has awaited a collective: did reduce forget to await one?"
                raise RanksDisagree(
                    f"step {step}: ranks 0 and {rank} have different results for {name!r}, so their weights "
                    f"would drift apart; {why}"
                )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, down to the sign of zeros; all NaN count as equal."""
    if a.is_sparse or b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    width = BITS.get(a.element_size())
    if width is None or not a.is_floating_point():
        return torch.equal(a, b)
    differ = a.contiguous().view(width) != b.contiguous().view(width)
    return not bool((differ & ~(a.isnan() & b.isnan())).any())
