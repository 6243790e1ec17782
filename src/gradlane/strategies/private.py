"""A mean that says little about any one worker."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from random import SystemRandom

import numpy as np
import torch
from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import all_reduce, note, step_sum
from ..core.numbers import is_number
from ..core.strategy import Reduced, Strategy
from ..core.streams import on_device
from ..errors import InvalidValue, WrongType
from ..log import log
from .accountant import Spent, epsilon_of, epsilon_of_all
from .nesting import check_wrapped

PIECE = 65_536  # elements at a time: the doubles they become stay in the cache
WITHIN = 1 - 1e-6  # of ``clip``: rounding may not carry a norm above it
FP16 = "Private with float16 on the wire: small noise would vanish there, and hide nothing; use bfloat16"


@dataclass
class Private(Strategy):
    """Differential privacy for workers, *never for single examples*: all data of a worker count as one.

    1. Each worker's gradient, all buckets together, is scaled down to a norm of at most ``clip``.
    2. Each of n ranks adds Gaussian noise of deviation ``noise_multiplier * clip / sqrt(n)``. The sum has
       deviation ``noise_multiplier * clip``, the mean ``noise_multiplier * clip / n``. Joined ranks add
       theirs too.
    3. ``inner`` takes the mean.

    ``epsilon(delta)`` is the cost of all steps so far. Two neighbouring runs differ by one worker, whose
    contributions are either present or zero in every step; n, which the mean divides by, is public and the
    same in both. The bound covers what leaves the group of ranks: averaged gradients, weights. It does not
    protect one rank from another, because a rank knows its own noise and may see single messages. Nor does it
    cover buffers, metrics or losses, which do not pass through here.

    ``sample_rate``: each worker takes part in a step with this probability (a secret coin; otherwise
    its gradient counts as zeros), and the mean is divided by it. The accountant credits that.

    A strategy inside must depend only on the sum of the ranks' gradients of this step: ``Mean``, ``Cast`` to
    bfloat16, ``PowerSGD``, ``Summed``. If the gradient of a rank that takes part is non-finite, nothing is
    sent and nothing spent: the answer is NaN, so that the step is skipped and a GradScaler lowers its scale.
    That a step was skipped is one bit that no noise covers. In the metrics ``private_nonfinite`` counts such
    gradients of this rank, and ``private_clipped`` the steps in which it was clipped.
    ``noise_multiplier=0`` only clips.

    Sources: McMahan et al. (2018) for the mechanism, Mironov (2017; et al., 2019) for the accountant.
    """

    inner: Strategy
    clip: float
    noise_multiplier: float
    sample_rate: float = 1.0
    spent: Spent = field(init=False)
    _participation: _Participation | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_number(self.clip) or not 0 < self.clip < math.inf:
            raise InvalidValue(f"Private clip={self.clip!r}; use a norm above 0")
        if not is_number(self.noise_multiplier) or not 0 <= self.noise_multiplier < math.inf:
            raise InvalidValue(
                f"Private noise_multiplier={self.noise_multiplier!r}; use a multiple of clip from 0 up, "
                f"such as 1.0"
            )
        if not is_number(self.sample_rate) or not 0 < self.sample_rate <= 1:
            raise InvalidValue(
                f"Private sample_rate={self.sample_rate!r}; use a probability above 0, at most 1"
            )
        if self.noise_multiplier == 0:
            log.warning("Private with noise_multiplier=0 clips and hides nothing: its epsilon is infinite")
        self.spent = Spent(self.noise_multiplier, self.sample_rate)
        check_wrapped(self, self.inner, "Private(Mean(), clip=1.0, noise_multiplier=1.0)")

    def refuses_inside(self, part: Strategy) -> str | None:
        if not part.linear:
            return (
                f"Private cannot hold {type(part).__name__}: the noise of all ranks protects their sum, so "
                "what is inside may depend on this step's sum alone. Feedback keeps parts of a gradient for "
                "later, weights and robust rules treat ranks apart, other codecs encode before the noises "
                "have met. "
                "Write Private(Mean(), ...), or to send less Private(Cast(Mean(), bfloat16), ...), "
                "Private(PowerSGD(), ...) or Private(Summed(RandomK()), ...), without feedback"
            )
        return FP16 if _in_fp16(part) else None

    def refuses_around(self, wrapper: Strategy) -> str | None:
        if not wrapper.keeps_privacy:
            return (
                f"{type(wrapper).__name__} around Private would break its bound, which is for whole "
                "gradients, as they are, in every step; Private is the outermost, but for Cast and "
                "Nesterov"
            )
        return FP16 if _in_fp16(wrapper) else None

    def epsilon(self, delta: float, steps: int | None = None) -> float:
        """(epsilon, delta)-differential privacy *per worker*, never per example, of the steps so far.

        ``steps`` asks for a number of steps instead, to plan a run. A step that failed counts, because
        something was sent; one that was skipped before anything was sent does not. Steps of an earlier
        training with this strategy count, and those of a ``Private`` that ``swap`` has replaced by this one.
        """
        if steps is None:
            return epsilon_of_all(self.spent.runs(), delta)
        return epsilon_of(self.noise_multiplier, self.sample_rate, steps, delta)

    async def reduce(self, bucket: Bucket) -> Reduced:
        _check_bucket(bucket)
        flat = bucket.flat
        buffer = bucket.empty("private piece", min(PIECE, flat.numel()), torch.float64)
        square = await step_sum(squared_norm(flat, buffer), of=self)
        wide = flat
        if (dtype := torch.promote_types(flat.dtype, torch.float32)) != flat.dtype:
            wide = bucket.empty("private", flat.numel(), dtype).copy_(flat)
        part = await self._participate(square)
        if part.refused:
            return Reduced(flat.fill_(math.nan))
        if flat.device.type != "meta":
            part.scale_down(wide)
            if self.noise_multiplier:
                add_noise(wide, self.noise_multiplier * self.clip / math.sqrt(bucket.world), buffer)
        reduced = await self.inner.reduce(replace(bucket, flat=wide))
        mean = reduced.mean
        if self.sample_rate != 1:
            mean = mean.div_(self.sample_rate).detach()  # another object: it is not the bounded answer
        return Reduced(mean if wide is flat else flat.copy_(mean))

    async def _participate(self, square: Tensor) -> _Participation:
        """How this rank takes part in the step. All ranks agree on the step before anything is sent."""
        part = self._participation
        if part is not None and part.square is square:  # all buckets of a step get the same tensor
            return part
        part = _Participation(square, self.sample_rate)
        bad = await all_reduce(part.bad(), op="max", exact=True)
        if square.device.type != "meta":
            part.decide(bad, self.clip)
            self.spent.steps += not part.refused  # before anything is sent
            await note(private_clipped=part.clipped, private_nonfinite=part.nonfinite)
        self._participation = part
        return part


class _Participation:
    """How this rank takes part in one step."""

    def __init__(self, square: Tensor, sampling: float) -> None:
        self.square = square
        self.refused = self.nonfinite = self.clipped = False
        self._chosen = SystemRandom().random() < sampling
        self._scale = 0.0

    def bad(self) -> Tensor:
        """1 where this rank's gradient is not finite. That of a rank that takes no part must not show."""
        if not self._chosen:
            return torch.zeros(1, dtype=torch.int32, device=self.square.device)
        return self.square.isfinite().logical_not_().to(torch.int32).view(1)

    def decide(self, bad: Tensor, clip: float) -> None:
        """All ranks know now whether one of them is bad. The host waits once for all that it must know."""
        square, refused = torch.cat([self.square.view(1), bad.to(torch.float64)]).tolist()
        norm = math.sqrt(square)
        self.refused, self.nonfinite = bool(refused), not math.isfinite(norm)
        self.clipped = not self.nonfinite and norm > clip * WITHIN
        self._scale = 0.0 if not self._chosen else clip * WITHIN / norm if self.clipped else 1.0

    def scale_down(self, flat: Tensor) -> None:
        """Turn the gradient into this rank's contribution to the sum, without its noise."""
        if self._scale == 0:  # not 0 * nan
            flat.zero_()
        elif self._scale < 1:
            flat.mul_(self._scale)


def squared_norm(flat: Tensor, buffer: Tensor) -> Tensor:
    """In fp64, where no fp32 gradient overflows; one buffer at a time."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    if flat.device.type != "meta" and flat.numel():
        for piece in torch.split(flat, buffer.numel()):
            wide = buffer[: piece.numel()].copy_(piece)
            total += wide.dot(wide)
    return total


def add_noise(flat: Tensor, deviation: float, buffer: Tensor) -> None:
    """Gaussian noise that nobody can draw again.

    Here, and only here, randomness does not come from ``bucket.seed``: whoever could draw the noise again
    could subtract it. Each call has a key of 128 bits from the operating system, another one on every rank.
    """
    source = np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16), "little")))
    drawn = buffer if buffer.device.type == "cpu" else torch.empty(buffer.shape, dtype=buffer.dtype)
    for piece in torch.split(flat, max(1, buffer.numel())):
        part = drawn[: piece.numel()]
        source.standard_normal(out=part.numpy())
        piece.add_(on_device(part, flat.device), alpha=deviation)


def _check_bucket(bucket: Bucket) -> None:
    if bucket.flat.is_sparse:
        raise WrongType(
            f"Private cannot hide the sparse gradient of {bucket.names[0]!r}, whose indices show which rows "
            "were used; use a dense embedding"
        )
    if bucket.feedback is not None:
        raise InvalidValue(
            "feedback around Private would subtract its noise again in the next step; leave it out"
        )
    if bucket.wire == torch.float16:
        raise InvalidValue(FP16)


def _in_fp16(part: Strategy) -> bool:
    """Whether it is a ``Cast`` to float16."""
    return getattr(part, "dtype", None) == torch.float16
