"""The gradient itself, in fp32 or narrower: the control arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..errors import InvalidValue
from .base import PIECE, Codec

VALUES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Raw(Codec):
    """The gradient as it is, as numbers of type ``value``: float32 or bfloat16."""

    value: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.value not in VALUES:
            raise InvalidValue(f"Raw value={self.value!r}; use one of {', '.join(VALUES)}")

    @property
    def linear(self) -> bool:
        return self.value == "float32"  # sums in bfloat16 are rounded

    def layout(self, numel: int) -> PayloadLayout:
        return (((numel,), VALUES[self.value]),)

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
            torch.mul(payloads[0][0][start : start + size].float(), factor, out=total)
            for (values,) in payloads[1:]:
                total.add_(values[start : start + size].float() * factor)  # rounded twice on every processor

    def _encode_with_feedback(
        self, gradient: Tensor, residual: Tensor, residual_out: Tensor, seed: int, payload: Payload
    ) -> bool:
        if self.value == "float32":
            torch.add(gradient, residual, out=payload[0])
            residual_out.zero_()
        else:
            payload[0].copy_(torch.add(gradient, residual, out=residual_out))
            residual_out.sub_(payload[0])
        return False
