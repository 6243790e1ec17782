"""Deep gradient compression: top-k with momentum correction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from ..codecs.base import keep_finite
from ..codecs.topk import TopK
from ..core.bucket import Bucket, Feedback
from ..core.collectives import note
from ..core.memory import Memory
from ..core.numbers import is_number, is_whole
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue
from .exchange import Gathered
from .feedback import EF21, ErrorFeedback, residual_square

STAGES = (0.25, 0.0625, 0.015625, 0.00390625)
"""Shares that the stages of the paper's warm-up send; they leave out 75, 93.75, 98.4 and 99.6 %."""


@dataclass
class DGC(Strategy):
    """Deep Gradient Compression (Lin et al., 2018). Use it with an optimizer that has no momentum of its own.

    1. With ``clip``, clip this rank's gradient to ``clip`` / sqrt(world), each bucket for itself: a hook
       never sees the complete gradient.
    2. Momentum correction: u = momentum * u + g, and v = v + u is the residual.
    3. Send the largest ``ratio`` of v.
    4. Factor masking: where v was sent, u and v begin again at 0.

    ``warmup`` steps send more: the first fifth 25 %, then 6.25, 1.6, 0.4 %, then ``ratio``.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float | None = None
    warmup: int = 0
    velocity: Memory = field(init=False, default_factory=lambda: Memory(torch.float32))
    memory: Memory = field(init=False, default_factory=lambda: Memory(torch.float32))
    encodes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise InvalidValue(f"DGC ratio={self.ratio!r}; use a share above 0 and up to 1, such as 0.001")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise InvalidValue(f"DGC momentum={self.momentum!r}; use a number from 0 to below 1")
        if self.clip is not None and (not is_number(self.clip) or not self.clip > 0):
            raise InvalidValue(f"DGC clip={self.clip!r}; use a norm above 0, or None")
        if not is_whole(self.warmup) or self.warmup < 0:
            raise InvalidValue(f"DGC warmup={self.warmup!r}; use a number of steps from 0 up")

    def refuses_around(self, wrapper: Strategy) -> str | None:
        if isinstance(wrapper, ErrorFeedback | EF21):
            name = type(wrapper).__name__
            return f"{name}(DGC(...)): DGC keeps a residual of its own; leave {name} out"
        return None

    def share(self, step: int) -> float:
        """The share of a gradient that this step sends."""
        if step >= self.warmup:
            return self.ratio
        stages = (*STAGES, self.ratio)
        return max(self.ratio, stages[step * len(stages) // self.warmup])

    async def reduce(self, bucket: Bucket) -> Reduced:
        u, u_out = self.velocity.buffers(bucket)
        v, v_out = self.memory.buffers(bucket)
        torch.mul(u, self.momentum, out=u_out).add_(self._clipped(bucket))  # 1, 2
        bucket.flat.copy_(u_out)
        exchange = Gathered(TopK(self.share(bucket.step)))
        feedback = Feedback(v, v_out, want_sent=True)  # v_out = v + u - what is sent
        reduced = await exchange.reduce(replace(bucket, feedback=feedback))  # 3
        if reduced.sent is not None:
            u_out.masked_fill_(reduced.sent() != 0, 0.0)  # 4
        if not bucket.flat.is_meta:
            keep_finite(u_out)
            await note(residual_square=residual_square(v_out, bucket.step))
        return Reduced(reduced.mean, bounded=reduced.bounded)

    def _clipped(self, bucket: Bucket) -> torch.Tensor:
        if self.clip is None:
            return bucket.flat
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        norm = torch.linalg.vector_norm(bucket.flat, dtype=wide)
        limit = self.clip / math.sqrt(bucket.world)
        return bucket.flat.mul_((limit / norm.clamp(min=1e-30)).clamp(max=1.0))
