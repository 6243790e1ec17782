"""What codecs have in common whose payload is some elements of the gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ..core.collectives import Payload
from .base import Codec


class ScatteredCodec(Codec):
    """Decoding adds the elements of a payload at their positions; all others are zero."""

    @abstractmethod
    def _scatter(self, payload: Payload, into: Tensor, factor: float) -> None:
        """Add the elements, times ``factor``."""

    def _decode(self, payload: Payload, out: Tensor, seed: int) -> None:
        self._scatter(payload, out.zero_(), 1.0)

    def _add_decoded(self, payload: Payload, into: Tensor, seed: int) -> None:
        self._scatter(payload, into, 1.0)

    def _decode_sum(
        self, payloads: Sequence[Payload], out: Tensor, seeds: Sequence[int], factor: float
    ) -> None:
        out.zero_()
        for payload in payloads:
            self._scatter(payload, out, factor)
