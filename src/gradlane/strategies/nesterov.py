"""The outer optimizer of local training: Nesterov momentum on what the ranks agreed on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..core.bucket import Bucket
from ..core.memory import Memory
from ..core.numbers import is_number
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue
from ..kernels.finite import choose, finite_flag
from .checks import refuse_sparse
from .feedback import EF21, ErrorFeedback
from .mean import Mean
from .nesting import check_wrapped


@dataclass
class Nesterov(Strategy):
    """The outer step of DiLoCo (Douillard et al., 2023, 2311.08105) as a strategy.

    With delta the answer of the strategy inside, and u the velocity, 0 at first::

        u      = momentum * u + delta
        answer = lr * (delta + momentum * u)

    It is made for rounds of local training, where delta is the mean of what the ranks moved since the last
    round; the weights are then moved by the answer itself, at a learning rate of 1. With ``momentum=0`` it is
    plain outer SGD, which needs no memory. The defaults fit some tens of local steps between rounds; the
    paper has 0.9 for hundreds, which oversteps where rounds are short.

    The velocity has one copy of the gradient, in fp32 at least, kept by parameter name. It is computed from
    answers alone, so it is the same on all ranks, and any number of ranks can go on with it. If the answer is
    non-finite it is returned, so that the step is skipped, and the velocity stays as it was.
    """

    inner: Strategy = field(default_factory=Mean)
    lr: float = 0.7
    momentum: float = 0.5
    velocity: Memory = field(init=False, default_factory=lambda: Memory(torch.float32, shared=True))
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_wrapped(self, self.inner, "Nesterov(Mean()), say")
        if not is_number(self.lr) or not 0 < self.lr < math.inf:
            raise InvalidValue(f"Nesterov lr={self.lr!r}; use a number above 0, such as 0.7")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise InvalidValue(f"Nesterov momentum={self.momentum!r}; use a number from 0 to below 1")

    def refuses_inside(self, part: Strategy) -> str | None:
        if isinstance(part, Nesterov):
            return "Nesterov inside Nesterov has two velocities, one on top of the other; use one"
        if part.alike:
            return None
        name = type(part).__name__
        return (
            f"Nesterov(... {name}() ...): each rank would have another answer, and with it another velocity; "
            f"take a strategy that gives all ranks the same, Nesterov(Mean()), say, or {name}() by itself"
        )

    def refuses_around(self, wrapper: Strategy) -> str | None:
        if not isinstance(wrapper, ErrorFeedback | EF21):
            return None
        name = type(wrapper).__name__
        return (
            f"{name} outside of Nesterov would compare what was sent with a step of the momentum, which is "
            f"not the mean of it; put it inside: Nesterov({name}(...))"
        )

    async def reduce(self, bucket: Bucket) -> Reduced:
        refuse_sparse(bucket, "Nesterov")
        delta, flat = (await self.inner.reduce(bucket)).mean, bucket.flat
        if not self.momentum:
            return Reduced(flat.copy_(delta).mul_(self.lr).detach())  # another object: not the bounded mean
        u, u_out = self.velocity.buffers(bucket)
        moved = bucket.empty("nesterov velocity", flat.numel(), u.dtype)
        torch.mul(u, self.momentum, out=moved).add_(delta)
        step = bucket.empty("nesterov step", flat.numel(), u.dtype)
        torch.add(delta, moved, alpha=self.momentum, out=step).mul_(self.lr)
        answer = flat.copy_(step).detach()
        finite = finite_flag(answer)  # then delta and the new velocity are finite too
        choose(finite, moved, u, u_out)
        return Reduced(answer, bounded=finite is True)
