"""The largest elements, found by a threshold from a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..core.numbers import is_bounded, is_number
from ..core.streams import has_streams
from ..errors import InvalidValue
from ..kernels.counter import draw, keys_of
from ..kernels.native import native_for
from . import device_selection
from .base import keep_finite
from .scattered import ScatteredCodec
from .selection import SPAN, PlainSearch, Search, scatter_selected

EXACT_BELOW = 4096
"""With fewer elements the threshold is exact."""
SAMPLE = 16_384
"""The sample has at least as many elements and less than twice as many."""
AIM = 15 / 16
"""Share of the slots that the threshold aims to fill: an empty slot costs less than one too few."""
VALUES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TopK(ScatteredCodec):
    """About the ``ratio`` largest magnitudes (Aji and Heafield, 2017; sampled as in Lin et al., 2018).

    There are ceil(ratio * numel) slots. An element is taken if its magnitude reaches a threshold, which is a
    quantile of a sample. Elements are taken in order, beginning at an index that the seed gives and wrapping
    around at the end, until the slots are full; remaining slots stay empty. If the threshold misses by more
    than a factor of two, the exact one is computed. Zeros are never taken. It needs error feedback.

    Payload: values, positions as 16 bits within spans of 65,536 elements, and a count for each span, all in
    the order of the elements. If there is a NaN or Inf, the first value is NaN.
    """

    ratio: float = 0.01
    value: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise InvalidValue(f"TopK ratio={self.ratio!r}; use a share above 0 and up to 1, such as 0.01")
        if self.value not in VALUES:
            raise InvalidValue(f"TopK value={self.value!r}; use one of {', '.join(VALUES)}")

    def slots(self, numel: int) -> int:
        return max(1, math.ceil(self.ratio * numel)) if numel else 0

    def layout(self, numel: int) -> PayloadLayout:
        slots = self.slots(numel)
        return (
            ((slots,), VALUES[self.value]),
            ((slots,), torch.int16),
            ((-(-numel // SPAN),), torch.int32),
        )

    def bounded(self, payload: Payload) -> bool:
        return is_bounded(payload[0])

    def prepare(self, device: torch.device) -> None:
        device_selection.prepare(device)

    def _encode(self, flat: Tensor, seed: int, payload: Payload) -> None:
        self._select(flat, None, None, seed, payload)

    def _encode_with_feedback(
        self, gradient: Tensor, residual: Tensor, residual_out: Tensor, seed: int, payload: Payload
    ) -> bool:
        if self._select(gradient, residual, residual_out, seed, payload):
            return True
        if has_streams(gradient.device) or torch.isnan(payload[0][0]):  # the mark of a non-finite value
            keep_finite(residual_out)
            return True
        return False

    def _select(
        self, flat: Tensor, residual: Tensor | None, residual_out: Tensor | None, seed: int, payload: Payload
    ) -> bool:
        """True: ``residual_out`` is known to be finite."""
        keys, numel, slots = keys_of(seed), flat.numel(), payload[0].numel()
        start = draw(0, keys) * numel >> 32
        stride = numel // SAMPLE or 1
        offset = draw(1, keys) * stride >> 32
        sample = -(-(numel - offset) // stride)
        rank = min(sample, max(1, round(AIM * slots * sample / numel)))
        exact = numel < EXACT_BELOW or slots == numel
        if has_streams(flat.device):
            how = None if exact else (offset, stride, rank)
            return device_selection.select(flat, residual, residual_out, how, start, *payload)
        search: Search = (numel < 2**32 and native_for(flat)) or PlainSearch()  # the kernels count in 32 bits
        if exact:
            search.topk_select(
                flat, residual, residual_out, search.topk_exact(flat, residual, slots), start, *payload
            )
            return False
        threshold = search.topk_sampled(flat, residual, offset, stride, rank)
        found = search.topk_select(flat, residual, residual_out, threshold, start, *payload)
        if found > 2 * slots or (2 * found < slots and threshold > 1):
            if residual_out is not None:  # it holds gradient + residual by now, without what was taken
                self._add_decoded(payload, residual_out, seed)
                flat = residual_out
            search.topk_select(
                flat, None, residual_out, search.topk_exact(flat, None, slots), start, *payload
            )
        return False

    def _scatter(self, payload: Payload, into: Tensor, factor: float) -> None:
        values, indices, counts = payload
        if library := native_for(into):
            library.topk_scatter(values, indices, counts, into, factor)
        elif has_streams(into.device):
            device_selection.scatter(values, indices, counts, into, factor)
        else:
            scatter_selected(values, indices, counts, into, factor)
