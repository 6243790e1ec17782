"""What a codec is: a pure function from a gradient to a payload of fixed shapes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.collectives import Payload
from ..core.message import PayloadLayout
from ..core.streams import has_streams
from ..errors import InvalidValue
from ..kernels.finite import all_finite
from .checks import check_flat, check_residual, described

PIECE = 65_536  # elements; with its temporaries it stays in the second-level cache


class Codec(ABC):
    """Gradient <-> payload. Make it a frozen dataclass of options: no state, comparable, with a text form.

    Everything is a function of the input and the seed: the same bits on every rank, with any number of
    threads, compiled or not. A NaN or Inf never comes out finite. Codecs compute in fp32; other widths are
    converted on the way in and out. On ``meta`` tensors only the shapes are computed.
    """

    @property
    def linear(self) -> bool:
        """Payloads may be summed on the wire: all their tensors are float, and the sum decodes to the sum."""
        return False

    @property
    def granularity(self) -> int:
        """A chunk that is encoded by itself must begin at a multiple of this."""
        return 1

    @abstractmethod
    def layout(self, numel: int) -> PayloadLayout:
        """Shapes and dtypes of the payload of ``numel`` elements: this is what goes over the wire."""

    def encode(self, flat: Tensor, seed: int, out: Payload | None = None) -> Payload:
        """The payload of ``flat``, which does not change. ``out``: tensors of the layout to write into."""
        payload = self._payload(flat, out)
        if _holds_numbers(flat):
            self._encode(self._readable(flat), seed, payload)
        return payload

    def decode(self, payload: Payload, out: Tensor, seed: int = 0) -> Tensor:
        """Decode the payload into ``out``, and return it."""
        self._check(payload, out)
        return self._filled(out, lambda wide: self._decode(payload, wide, seed))

    def prepare(self, device: torch.device) -> None:  # noqa: B027  most codecs have nothing to prepare
        """Find out now which kernels the device has for this codec: the host may wait for the answer."""

    def add_decoded(self, payload: Payload, into: Tensor, seed: int = 0) -> None:
        """``into += decoded``, in one pass where the kernels are compiled."""
        self._check(payload, into)
        if not _holds_numbers(into):
            return
        if self.takes(into):
            self._add_decoded(payload, into, seed)
        else:
            wide = torch.empty_like(_flat(into), dtype=torch.float32)
            self._decode(payload, wide, seed)
            into.add_(wide)

    def decode_sum(
        self, payloads: Sequence[Payload], out: Tensor, seeds: Sequence[int], factor: float = 1.0
    ) -> Tensor:
        """Write the sum of the decoded payloads, in their order, times ``factor``, into ``out`` in one pass.
        Scales or values are multiplied as they are read, if there are any; otherwise the sum is.
        """
        for payload in payloads:
            self._check(payload, out)
        return self._filled(out, lambda wide: self._decode_sum(payloads, wide, seeds, factor))

    def encode_with_feedback(
        self,
        gradient: Tensor,
        residual: Tensor,
        seed: int,
        out: Payload | None = None,
        residual_out: Tensor | None = None,
    ) -> Payload:
        """Error feedback in one pass (EF14, Seide et al. 2014): p = gradient + residual, the payload is that
        of p, and residual_out = p - decoded payload.

        Without ``residual_out`` the residual is updated in place; with it, ``residual`` does not change. The
        gradient never changes. The new residual is always finite: where p is not, it is the old residual, or
        0.
        """
        payload = self._payload(gradient, out)
        residual_out = residual if residual_out is None else residual_out
        check_residual(gradient, residual, residual_out)
        if not _holds_numbers(gradient):
            return payload
        if residual.dtype == torch.float64:  # the residual includes what fp32 cannot hold
            self._encode(_single(torch.add(residual, gradient, out=residual_out)), seed, payload)
            keep_finite(residual_out.sub_(self.decode(payload, torch.empty_like(residual_out), seed)))
        else:
            before = residual if self.takes(residual) else _single(residual)
            after = residual_out
            if not self.takes(residual_out):
                after = torch.empty_like(before) if before is residual else before
            is_finite = self._encode_with_feedback(self._readable(gradient), before, after, seed, payload)
            if after is not residual_out:
                residual_out.copy_(after)
                is_finite = False
            if not is_finite and not self.bounded(payload):  # rounding a large number may have overflowed
                keep_finite(residual_out)
        return payload

    def bounded(self, payload: Payload) -> bool:
        """Whether the payload itself shows that it was made of values that are finite and small enough to be
        summed over any number of ranks. If it does not, the answer has to be checked."""
        return False

    def takes(self, tensor: Tensor) -> bool:
        """Whether the codec works on a tensor as it is; others are converted to fp32."""
        return tensor.dtype == torch.float32 and tensor.is_contiguous()

    @abstractmethod
    def _encode(self, flat: Tensor, seed: int, payload: Payload) -> None:
        """``flat`` is what the codec ``takes``, contiguous and not empty, here and below."""

    @abstractmethod
    def _decode(self, payload: Payload, out: Tensor, seed: int) -> None: ...

    def _decode_sum(
        self, payloads: Sequence[Payload], out: Tensor, seeds: Sequence[int], factor: float
    ) -> None:
        self._decode(payloads[0], out, seeds[0])
        for payload, seed in zip(payloads[1:], seeds[1:], strict=True):
            self._add_decoded(payload, out, seed)
        if factor != 1.0:
            out.mul_(factor)

    def _add_decoded(self, payload: Payload, into: Tensor, seed: int) -> None:
        decoded = torch.empty_like(into)
        self._decode(payload, decoded, seed)
        into.add_(decoded)

    def _encode_with_feedback(
        self, gradient: Tensor, residual: Tensor, residual_out: Tensor, seed: int, payload: Payload
    ) -> bool:
        """``residual_out`` may be ``residual``; otherwise its old contents are ignored. The answer: whether
        it is known to be finite."""
        self._encode(torch.add(residual, gradient, out=residual_out), seed, payload)
        decoded = torch.empty_like(residual_out)
        self._decode(payload, decoded, seed)
        keep_finite(residual_out.sub_(decoded))
        return True

    def _readable(self, flat: Tensor) -> Tensor:
        return flat.detach() if self.takes(flat) else _single(flat)

    def _filled(self, out: Tensor, write: Callable[[Tensor], None]) -> Tensor:
        """``out``, filled by a function that writes what the codec takes."""
        if _holds_numbers(out):
            wide = out if self.takes(out) else torch.empty_like(_flat(out), dtype=torch.float32)
            write(wide)
            if wide is not out:
                out.copy_(wide)
        return out

    def _payload(self, flat: Tensor, out: Payload | None) -> Payload:
        check_flat(flat, type(self).__name__)
        if out is None:
            return tuple(
                torch.empty(shape, dtype=dtype, device=flat.device)
                for shape, dtype in self.layout(flat.numel())
            )
        self._check(out, flat)
        return out

    def _check(self, payload: Payload, flat: Tensor) -> None:
        # The kernels write through bare pointers: a wrong shape must not get that far.
        check_flat(flat, type(self).__name__)
        layout = self.layout(flat.numel())
        fits = len(payload) == len(layout) and all(
            part.shape == shape
            and part.dtype == dtype
            and part.device == flat.device
            and part.is_contiguous()
            for part, (shape, dtype) in zip(payload, layout, strict=False)
        )
        if not fits:
            wanted = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in layout)
            raise InvalidValue(
                f"{type(self).__name__} of {flat.numel()} elements on {flat.device} has the payload "
                f"({wanted}), got ({', '.join(described(part) for part in payload)}); "
                f"make it with layout({flat.numel()})"
            )


def keep_finite(residual: Tensor) -> None:
    """Set non-finite values to 0."""
    if has_streams(residual.device) or not all_finite(residual):
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _holds_numbers(flat: Tensor) -> bool:
    return flat.device.type != "meta" and flat.numel() > 0


def _single(flat: Tensor) -> Tensor:
    return flat.detach().to(torch.float32).contiguous()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous()
