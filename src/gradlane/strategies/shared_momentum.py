"""The momentum of an optimizer, computed and compressed on its way: 1-bit Adam's half of the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor

from ..core.bucket import Bucket, as_layout
from ..core.memory import Memory
from ..core.numbers import is_number
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, WrongType
from ..kernels.finite import choose, finite_flag
from .checks import refuse_sparse
from .feedback import EF21, ErrorFeedback
from .momentum import WorkerMomentum
from .nesting import check_wrapped

Beta = float | Mapping[str, float]
"""One factor for all parameters, or factors by name pattern."""


@dataclass
class SharedMomentum(Strategy):
    """Every rank sends beta m + (1 - beta) g, where m is the momentum that all ranks share: the last answer.

    Tang et al., 2021, "1-bit Adam": the answer is the optimizer's momentum, so the optimizer must have none.
    Momentum changes slowly and is not squared any more, so one bit of it is enough where one bit of Adam's
    gradient is not. ``freeze_moments`` sets up Adam for it. Error feedback goes inside.

    Unlike with ``WorkerMomentum``, what a rank sends depends on its own history by the residual alone. So
    the memory is the same on all ranks, and any number of ranks can go on with it. A step whose answer is
    not finite leaves it as it was.

    ``beta`` is one number, or numbers by name pattern, of which the first that matches counts.
    """

    inner: Strategy
    beta: Beta = 0.9
    memory: Memory = field(init=False, default_factory=lambda: Memory(torch.float32, shared=True))
    keeps_privacy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_wrapped(self, self.inner, "SharedMomentum(ErrorFeedback(Sharded(Sign()))), say")
        _check_beta(self.beta)

    def refuses_around(self, wrapper: Strategy) -> str | None:
        name = type(wrapper).__name__
        if isinstance(wrapper, SharedMomentum | WorkerMomentum):
            return f"{name} around SharedMomentum would apply momentum twice; use one of them"
        if isinstance(wrapper, ErrorFeedback | EF21):
            return (
                f"{name} outside of SharedMomentum would take what the momentum holds back for a loss; put "
                f"it inside: SharedMomentum({name}(...))"
            )
        return None

    def refuses_inside(self, part: Strategy) -> str | None:
        if isinstance(part, WorkerMomentum):
            return "SharedMomentum around WorkerMomentum would apply momentum twice; use one of them"
        return None

    async def reduce(self, bucket: Bucket) -> Reduced:
        refuse_sparse(bucket, "SharedMomentum")
        flat = bucket.flat
        m, m_out = self.memory.buffers(bucket)
        moved = bucket.empty("shared momentum", flat.numel(), m.dtype)
        if bucket.joined and bucket.divisor() < bucket.world:
            moved.zero_()  # the mean is over the others, who send all of the momentum
        else:
            self._move(m, flat, moved, bucket)
        flat.copy_(moved)
        reduced = await self.inner.reduce(bucket)
        choose(finite_flag(reduced.mean), reduced.mean, m, m_out)
        return Reduced(reduced.mean, bounded=reduced.bounded)

    def _move(self, m: Tensor, g: Tensor, out: Tensor, bucket: Bucket) -> None:
        """out = beta m + (1 - beta) g"""
        if not isinstance(self.beta, Mapping):
            torch.mul(m, self.beta, out=out).add_(g, alpha=1 - self.beta)
            return
        layout = as_layout(bucket.layout)
        for (slot, own), (_, old), (_, new) in zip(
            layout.views(g), layout.views(m), layout.views(out), strict=True
        ):
            beta = self.beta_of(slot.name)
            torch.mul(old, beta, out=new).add_(own, alpha=1 - beta)

    def beta_of(self, name: str) -> float:
        """The factor of a parameter."""
        if not isinstance(self.beta, Mapping):
            return self.beta
        for pattern, beta in self.beta.items():
            if fnmatchcase(name, pattern):
                return beta
        raise InvalidValue(f"no pattern of beta={dict(self.beta)} matches {name!r}; add '*': 0.9 at its end")


def _check_beta(beta: object) -> None:
    for value in beta.values() if isinstance(beta, Mapping) else [beta]:
        if not is_number(value) or not 0 <= value < 1:
            raise InvalidValue(f"beta={value!r} is not possible; use a number from 0 to below 1")
    for pattern in beta if isinstance(beta, Mapping) else []:
        if not isinstance(pattern, str):
            raise WrongType(f"beta has the key {pattern!r}; use name patterns such as 'head.*'")
