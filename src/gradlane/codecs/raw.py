"""No compression: the control arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.collectives import Payload
from .base import PIECE, Codec, Layout


@dataclass(frozen=True)
class Raw(Codec):
    """The gradient as it is, in fp32."""

    linear: ClassVar[bool] = True

    def layout(self, numel: int) -> Layout:
        return (((numel,), torch.float32),)

    def _encode(self, flat: Tensor, seed: int, payload: Payload) -> None:
        payload[0].copy_(flat)

    def _decode(self, payload: Payload, out: Tensor, seed: int) -> None:
        out.copy_(payload[0])

    def _add_decoded(self, payload: Payload, into: Tensor, seed: int) -> None:
        into.add_(payload[0])

    def _decode_sum(
        self, payloads: Sequence[Payload], out: Tensor, seeds: Sequence[int], factor: float
    ) -> None:
        size = PIECE if out.device.type == "cpu" else out.numel()  # a piece stays in the cache
        for start in range(0, out.numel(), size):
            total = out[start : start + size]
            torch.mul(payloads[0][0][start : start + size], factor, out=total)
            for (values,) in payloads[1:]:
                total.add_(values[start : start + size] * factor)

    def _encode_owed(self, gradient: Tensor, owed: Tensor, left: Tensor, seed: int, payload: Payload) -> None:
        torch.add(gradient, owed, out=payload[0])
        left.zero_()
