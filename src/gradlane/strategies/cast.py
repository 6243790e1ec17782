"""Narrower numbers on the wire, whatever the strategy inside sends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import Payload, Request, all_gather, all_to_all, note
from ..core.numbers import HUGE
from ..core.running import intercept
from ..core.strategy import Reduced, Strategy
from ..core.streams import has_streams
from ..errors import InvalidValue, WrongType
from ..kernels.elementwise import count_overflow
from ..kernels.finite import divided
from .nesting import check_wrapped

NARROW = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_FP16_SUM = 6e4  # the sum over all ranks must be below the largest number, 65,504
MUCH_SMALLER = 1000  # sums are checked where the wire's range is so much smaller: in fp16, not in bf16
SAMPLE = 16_384  # elements of a message that are checked for underflow


@dataclass
class Cast(Strategy):
    """Send every floating-point payload of ``inner`` as ``dtype``; inside, tensors stay as wide as before.
    Requests with ``exact=True`` are not narrowed.

    A mean divides before it narrows, so gradients of 1e5 and 0 average to 5e4 in fp16, where a cast first
    would make inf. In the metrics: ``overflow`` counts finite values that became infinite (exact),
    ``overflow_sum`` those whose sum over the ranks became infinite (checked on ranks whose own part was
    large, which is one at least), and ``underflow`` non-zero values that became zero (exact up to 16,384
    elements, beyond that estimated from a window that moves from step to step).

    ``ErrorFeedback`` around it keeps what the narrowing on this rank loses, but not what sums on the wire
    round off. ``ErrorFeedback(Sharded(Raw("bfloat16")))`` sends the same bytes, and loses nothing.
    """

    inner: Strategy
    dtype: torch.dtype
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_wrapped(self, self.inner, "Cast(Mean(), dtype)")
        if self.dtype not in NARROW:
            raise InvalidValue(
                f"dtype={self.dtype} cannot be summed by the backends; use one of "
                f"{', '.join(str(dtype) for dtype in NARROW)}"
            )

    def refuses_inside(self, part: Strategy) -> str | None:
        if not part.encodes:
            return None
        name = type(part).__name__
        return (
            f"Cast would narrow what the codec of {name} sends, its scales too, and nobody would keep what "
            f"that loses. The codec decides how wide {name} is: leave Cast out, take Raw('bfloat16') or "
            "TopK(..., value='bfloat16'), or put Cast beside it in a Route"
        )

    async def reduce(self, bucket: Bucket) -> Reduced:
        wire = _NarrowWire(self.dtype, bucket)
        reduced = await intercept(self.inner.reduce(replace(bucket, wire=self.dtype)), wire.answer)
        if bucket.wants_sent and reduced.sent is None and wire.kept is None and wire.narrowed:
            raise InvalidValue(
                f"error feedback around Cast cannot know what {type(self.inner).__name__} lost: it does not "
                "say what it sent; return Reduced(mean, sent=...) with bucket.as_seen(...), or leave Cast or "
                "the feedback out"
            )
        if reduced.sent is None and wire.kept is not None:
            kept, scale = wire.kept, bucket.divisor()
            return Reduced(reduced.mean, sent=lambda: kept.to(bucket.flat.dtype).mul_(scale))
        if reduced.mean is wire.bounded:
            return replace(reduced, bounded=True)
        # With a narrower exponent a bounded value may overflow, so the answer must be checked after all.
        return reduced if _has_range_of_fp32(self.dtype) else replace(reduced, bounded=False)

    @property
    def scatters(self) -> bool:
        return self.inner.scatters

    async def scatter(self, bucket: Bucket) -> Tensor:
        wire = _NarrowWire(self.dtype, bucket)
        return await intercept(self.inner.scatter(replace(bucket, wire=self.dtype)), wire.answer)

    async def gather(self, bucket: Bucket) -> list[Tensor]:
        wire = _NarrowWire(self.dtype, bucket)
        return await intercept(self.inner.gather(replace(bucket, wire=self.dtype)), wire.answer)


class _NarrowWire:
    """Answers the requests of the strategy inside with narrowed ones."""

    def __init__(self, dtype: torch.dtype, bucket: Bucket) -> None:
        self.dtype = dtype
        self.bucket = bucket
        self.narrowed = 0  # messages so far; each has a buffer of its own
        self.bounded: Tensor | None = None  # an answer that is a mean of bounded values
        self.kept: Tensor | None = None  # this rank's part of a plain mean as it was sent, for feedback

    async def answer(self, request: Request) -> object:
        if request.exact or not any(self._too_wide(tensor) for tensor in request.tensors):
            return await request
        if request.kind == "all_reduce" or request.kind == "reduce_scatter":
            return await self._sum(request)
        widths = [tensor.dtype for tensor in request.payloads[0]]
        narrow = [await self._narrowed(payload) for payload in request.payloads]
        if request.kind == "all_gather":
            received = await all_gather(narrow[0], over=request.over)
        else:
            received = await all_to_all(narrow, over=request.over)
        return [
            tuple(part.to(width) for part, width in zip(payload, widths, strict=True)) for payload in received
        ]

    async def _sum(self, request: Request) -> Tensor:
        (wide,) = request.payloads[0]
        if wide.is_sparse:
            raise WrongType(
                f"Cast cannot carry the sparse gradient of {self.bucket.names[0]!r}; give it a "
                f"strategy of its own with Route({{{self.bucket.names[0]!r}: Mean()}}, "
                "otherwise=Cast(...)), or use a dense embedding"
            )
        mean = request.op == "mean"
        divisor = self.bucket.divisor(request.over)
        on_device, bounded = has_streams(wide.device), False
        if mean and not on_device:
            limit = HUGE if _has_range_of_fp32(self.dtype) else LARGEST_FP16_SUM / divisor
            bounded = divided(wide, divisor, limit)
        # A device divides in the pass that narrows: it does not know there what is bounded.
        spread = divisor if mean else 1
        narrow = await self._narrow(wide, spread, divisor=spread if on_device else 1)
        if self.bucket.wants_sent and mean and wide.shape == self.bucket.flat.shape:
            self.kept = narrow.clone()
        total: Tensor = await replace(request, payloads=((narrow,),), op="sum" if mean else request.op)
        if request.kind == "reduce_scatter":
            start = self.bucket.place(request.over) * total.numel()
            wide = wide[start : start + total.numel()]
        self.bounded = wide if bounded else None
        if not bounded and may_overflow(wide.dtype, self.dtype, MUCH_SMALLER) and _holds_numbers(wide):
            await note(overflow_sum=overflow(wide, total))
        return wide.copy_(total)

    async def _narrowed(self, payload: Payload) -> Payload:
        return tuple([await self._narrow(part) for part in payload])

    async def _narrow(self, wide: Tensor, spread: int = 1, divisor: int = 1) -> Tensor:
        """``wide / divisor``; ``spread``: what it has been divided by, then or before."""
        if not self._too_wide(wide):
            return wide
        self.narrowed += 1
        narrow = self.bucket.empty(f"cast {self.narrowed}", wide.numel(), self.dtype).view(wide.shape)
        if divisor == 1:
            narrow.copy_(wide)
        else:
            torch.div(wide, divisor, out=narrow)
        if _holds_numbers(wide):
            lost = underflow(wide, narrow, self.bucket.step)
            if may_overflow(wide.dtype, self.dtype, spread):
                await note(overflow=overflow(wide, narrow), underflow=lost)
            else:
                await note(underflow=lost)
        return narrow

    def _too_wide(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.element_size() > self.dtype.itemsize


def _has_range_of_fp32(dtype: torch.dtype) -> bool:
    """True for bf16, not for fp16."""
    return torch.finfo(dtype).max > 1e38


def _holds_numbers(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.numel() > 0


def may_overflow(wide: torch.dtype, narrow: torch.dtype, spread: int) -> bool:
    """Whether a value that was divided by ``spread`` can be too large: never so for bf16 means."""
    return torch.finfo(wide).max / spread > torch.finfo(narrow).max


def overflow(wide: Tensor, narrow: Tensor) -> Tensor | int:
    """How many finite values became infinite. One cheap pass; they are counted only where there are some, and
    on a device always: the host does not wait for it."""
    if has_streams(narrow.device):
        return count_overflow(wide, narrow)
    low, high = torch.aminmax(narrow)
    if torch.isfinite(low) & torch.isfinite(high):
        return 0
    return (torch.isinf(narrow) & torch.isfinite(wide)).sum()


def underflow(wide: Tensor, narrow: Tensor, step: int) -> Tensor | float:
    """Non-zero values that became zero, estimated from a moving window where there are many."""
    count = wide.numel()
    if count <= SAMPLE:
        return torch.count_nonzero(wide) - torch.count_nonzero(narrow)
    start = step * SAMPLE % (count - SAMPLE + 1)
    window = slice(start, start + SAMPLE)
    seen = torch.count_nonzero(wide.view(-1)[window]) - torch.count_nonzero(narrow.view(-1)[window])
    return seen * (count / SAMPLE)
