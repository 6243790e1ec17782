"""Local steps: the ranks train alone for a while, then agree on new weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..core.bucket import Bucket, Layout, as_layout
from ..core.collectives import note
from ..core.memory import Memory
from ..core.numbers import is_number, is_whole
from ..core.strategy import Reduced, Strategy
from ..errors import InvalidValue, WrongType
from ..kernels.finite import choose, finite_flag
from .checks import refuse_memory_in_warm_up, refuse_sparse
from .local_state import LocalState
from .mean import Mean
from .nesting import check_wrapped
from .sampling import sample_of

Buffers = Literal["mean", "own"]
Moments = Literal["own", "frozen"]


@dataclass
class LocalSteps(Strategy):
    """One round of local training (local SGD, FedAvg; DiLoCo with ``Nesterov`` inside).

    The buckets of a round hold weights, not gradients. With theta the weights that all ranks agreed on last,
    the anchor, and theta_r those of this rank after ``every`` steps of its own:

        delta_r = theta - theta_r
        delta   = what the strategy inside makes of all delta_r
        theta  <- theta - delta

    So ``LocalSteps(Mean())`` averages the weights, and any other strategy compresses, weighs or filters what
    the ranks have learned. Give it to ``local_steps``, which explains the options; ``attach`` refuses it.
    ``first`` reduces the gradients of the warm-up, and is not part of a round.

    The anchor is in fp32 where the weights are narrower, which makes fp32 masters of them. With the copy that
    undoes a failed round, it takes two copies of the weights.
    """

    takes: ClassVar[Literal["gradients", "weights"]] = "weights"
    inner: Strategy
    every: int = 16
    warmup: int = 0
    first: Strategy = field(default_factory=Mean)
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0
    buffers: Buffers = "mean"
    moments: Moments = "own"
    anchor: Memory = field(init=False, default_factory=lambda: Memory(torch.float32, shared=True))
    agreed_buffers: Memory = field(init=False, default_factory=lambda: Memory(shared=True, any_shape=True))
    local: LocalState = field(init=False, default_factory=LocalState)
    _last: dict[Layout, Tensor] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_wrapped(self, self.inner, "LocalSteps(Nesterov(ErrorFeedback(Sharded(Int4()))), every=32)")
        for name, least in (("every", 1), ("warmup", 0), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise InvalidValue(f"{name}={value!r} is not possible; use a whole number from {least} up")
        if self.every % self.fragments:
            raise InvalidValue(
                f"every={self.every} is no multiple of fragments={self.fragments}: each of them is due "
                "once in that time, at equal distances; use a multiple"
            )
        if self.delay and self.delay >= self.period:
            raise InvalidValue(
                f"delay={self.delay} is too long: a fragment is due every {self.period} steps (every / "
                "fragments), and the one before must have arrived; use a delay below that"
            )
        if not is_number(self.blend) or not 0 <= self.blend < 1:
            raise InvalidValue(f"blend={self.blend!r} is not possible; use a number from 0 to below 1")
        for name, known in (("buffers", get_args(Buffers)), ("moments", get_args(Moments))):
            if getattr(self, name) not in known:
                ways = " or ".join(map(repr, known))
                raise InvalidValue(f"{name}={getattr(self, name)!r} is not known; use {ways}")
        self._check_warm_up()

    def _check_warm_up(self) -> None:
        if not isinstance(self.first, Strategy):
            raise WrongType(f"first={self.first!r} is not a strategy; write Sharded(Int8()), say")
        refuse_memory_in_warm_up(self.first)
        if self.warmup == 0 and self.first != Mean():
            raise InvalidValue("first= is the strategy of the warm-up, and warmup is 0; set warmup= too")
        if self.warmup == 0 and self.moments == "frozen":
            raise InvalidValue(
                "moments='frozen' keeps the second moment of Adam as it is after the warm-up, and warmup is "
                "0; use a tenth of the training, warmup=60 say"
            )

    def with_inner(self, inner: Strategy) -> LocalSteps:
        """The same options, anchor and position, with another strategy inside."""
        made = replace(self, inner=inner)
        made.anchor, made.agreed_buffers, made.local = self.anchor, self.agreed_buffers, self.local
        return made

    @property
    def period(self) -> int:
        """Steps between two rounds: each takes one fragment."""
        return self.every // self.fragments

    def due(self, steps: int) -> int | None:
        """The fragment whose round begins after so many steps of the optimizer; None if no round does."""
        since = steps - self.warmup
        return since // self.period % self.fragments if since > 0 and since % self.period == 0 else None

    def dealt(self, sizes: Mapping[str, int]) -> list[list[str]]:
        """The parameters of each fragment. The largest are dealt out first, each to the fragment that is
        smallest so far, so that fragments are of like size; within one, the order is the model's."""
        members: list[list[str]] = [[] for _ in range(self.fragments)]
        totals = [0] * self.fragments
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            smallest = totals.index(min(totals))
            members[smallest].append(name)
            totals[smallest] += sizes[name]
        place = {name: number for number, name in enumerate(sizes)}
        return [sorted(names, key=place.__getitem__) for names in members]

    def refuses_inside(self, part: Strategy) -> str | None:
        if isinstance(part, LocalSteps):
            return "LocalSteps inside LocalSteps: its buckets hold weights, not differences; use one of them"
        if not part.alike:
            return (
                f"{type(part).__name__} gives every rank another answer, so that the ranks would never agree "
                "on weights; use Mean(), say"
            )
        return None

    def refuses_around(self, wrapper: Strategy) -> str | None:
        if isinstance(wrapper, LocalSteps):
            return None  # it says so itself
        name = type(wrapper).__name__
        return (
            f"{name}(LocalSteps(...)): LocalSteps takes weights, not gradients, and must be the outermost; "
            f"write LocalSteps({name}(...))"
        )

    async def reduce(self, bucket: Bucket) -> Reduced:
        refuse_sparse(bucket, "LocalSteps")
        weights = bucket.flat
        anchor, anchor_out = self.anchor.buffers(bucket)
        delta = _difference(bucket, anchor)
        own = sample_of(delta).clone()
        reduced = await self.inner.reduce(replace(bucket, flat=delta))
        moved = torch.sub(anchor, reduced.mean, out=delta)
        # All ranks see in the answer what is not finite, and go back; it is not remembered.
        choose(finite_flag(moved), moved, anchor, anchor_out)
        if not weights.is_meta:
            await note(**self._figures(as_layout(bucket.layout), own, sample_of(reduced.mean)))
        return Reduced(weights if moved is weights else weights.copy_(moved))

    def _figures(self, layout: Layout, own: Tensor, mean: Tensor) -> Mapping[str, Tensor]:
        """Squares and a product, summed over the buckets of a round, from a sample of large buckets."""
        mean = mean.double()
        last = self._last.get(layout)
        self._last[layout] = mean.clone()
        zero = mean.new_zeros(())
        figures = {"drift_square": (own - mean).square().sum(), "update_square": mean.square().sum()}
        if last is not None:
            figures |= {"last_update_square": last.square().sum(), "update_product": (mean * last).sum()}
        return {name: value if torch.isfinite(value) else zero for name, value in figures.items()}


def _difference(bucket: Bucket, anchor: Tensor) -> Tensor:
    """Anchor less weights. Narrow weights began the round as the anchor rounded to their width."""
    weights = bucket.flat
    if weights.dtype == anchor.dtype:
        return torch.sub(anchor, weights, out=weights)
    began = anchor.to(weights.dtype)
    delta = bucket.empty("difference of weights", weights.numel(), anchor.dtype)
    return delta.copy_(began).sub_(weights)
