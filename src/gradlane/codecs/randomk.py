"""Elements at random positions that all ranks know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..core.numbers import is_bounded, is_number
from ..core.streams import has_streams
from ..errors import InvalidValue
from ..kernels.counter import draws, keys_of
from ..kernels.native import native_for
from .base import Codec, keep_finite


@dataclass(frozen=True)
class RandomK(Codec):
    """A ``ratio`` of the elements, at positions drawn from the seed, which must be the same on all ranks: no
    indices travel, and payloads may be summed (Konecny and Richtarik, 2018; Vogels et al., 2019).

    The gradient is cut into as many equal strata as there are draws, and one element (or ``run``
    consecutive ones) is taken from each. With error feedback the values go as they are;
    ``unbiased=True`` multiplies them by the size of their stratum, for use without.
    """

    ratio: float = 0.01
    run: int = 1
    unbiased: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise InvalidValue(f"RandomK ratio={self.ratio!r}; use a share above 0 and up to 1, such as 0.01")
        if not isinstance(self.run, int) or self.run < 1:
            raise InvalidValue(f"RandomK run={self.run!r}; use a whole number from 1 up")

    @property
    def linear(self) -> bool:
        return True

    def units(self, numel: int) -> int:
        """How many runs are taken."""
        return max(1, math.ceil(self.ratio * -(-numel // self.run))) if numel else 0

    def layout(self, numel: int) -> PayloadLayout:
        return (((self.units(numel) * self.run,), torch.float32),)

    def bounded(self, payload: Payload) -> bool:
        return is_bounded(payload[0])

    def _encode(self, flat: Tensor, seed: int, payload: Payload) -> None:
        keys, units = keys_of(seed), self.units(flat.numel())
        if library := native_for(flat):
            library.random_gather(flat, self.run, units, keys, self.unbiased, payload[0])
            return
        positions, inside, sizes = self._positions(flat, seed)
        values = torch.where(inside, flat[positions], 0.0)
        if self.unbiased:
            values.mul_(sizes[:, None])
        payload[0].copy_(values.view(-1))

    def _decode(self, payload: Payload, out: Tensor, seed: int) -> None:
        self._scatter(payload, out.zero_(), seed, 1.0)

    def _add_decoded(self, payload: Payload, into: Tensor, seed: int) -> None:
        self._scatter(payload, into, seed, 1.0)

    def _decode_sum(
        self, payloads: Sequence[Payload], out: Tensor, seeds: Sequence[int], factor: float
    ) -> None:
        out.zero_()
        for payload, seed in zip(payloads, seeds, strict=True):
            self._scatter(payload, out, seed, factor)

    def _encode_with_feedback(
        self, gradient: Tensor, residual: Tensor, residual_out: Tensor, seed: int, payload: Payload
    ) -> bool:
        self._encode(torch.add(residual, gradient, out=residual_out), seed, payload)
        self._scatter(payload, residual_out, seed, -1.0)
        keep_finite(residual_out)
        return True

    def _scatter(self, payload: Payload, into: Tensor, seed: int, factor: float) -> None:
        if library := native_for(into):
            units = self.units(into.numel())
            library.random_scatter(payload[0], self.run, units, keys_of(seed), into, factor)
            return
        positions, inside, _ = self._positions(into, seed)
        values = torch.where(inside, payload[0].view_as(positions) * factor, 0.0)
        if has_streams(into.device):  # positions beyond the end add 0 to the last element
            into.index_add_(0, positions.view(-1), values.view(-1))
        else:
            into[positions[inside]] += values[inside]

    def _positions(self, flat: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each run: the positions, which of them exist (the last run may reach beyond the end), and
        the size of its stratum."""
        numel = flat.numel()
        runs, units = -(-numel // self.run), self.units(numel)
        bounds = torch.arange(units + 1, device=flat.device) * runs // units
        sizes = bounds[1:] - bounds[:-1]
        chosen = bounds[:-1] + (draws(0, units, keys_of(seed), flat.device) * sizes >> 32)
        positions = chosen[:, None] * self.run + torch.arange(self.run, device=flat.device)
        return positions.clamp(max=numel - 1), positions < numel, sizes
