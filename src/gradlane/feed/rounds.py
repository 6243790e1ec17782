"""A round of local training: from the weights of this rank to those that all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Layout
from ..core.collectives import all_reduce
from ..core.memory import Memory
from ..core.strategy import Reduced, Strategy
from .drift import minority
from .layout import layout_of
from .roll_call import RollCall, call_roll, submit_aside
from .step import State, Step
from .weight_buckets import Parameters, WeightBucket

ALL = -1
"""Instead of a fragment: a last round, of the whole model."""


@dataclass(frozen=True)
class Call:
    """What a rank says at the begin of a round; it must be the same on all ranks."""

    local_steps: int
    fragment: int
    anchor: int
    """A hash of the anchor where it is new, 0 where the last round has made it."""
    moments: int
    """A hash of Adam's second moments where they have been frozen since the last round, otherwise 0."""

    def objection(self, table: Sequence[Sequence[int]]) -> str | None:
        """What differs between the ranks. ``table`` has a row for each of them."""
        steps, fragments, anchors, moments = zip(*table, strict=True)
        if len(set(steps)) > 1 or len(set(fragments)) > 1:
            came = ", ".join(
                f"rank {rank} after {step} local steps{' in finish()' if fragment == ALL else ''}"
                for rank, (step, fragment) in enumerate(zip(steps, fragments, strict=True))
            )
            return (
                f"the ranks do not come to this round together: {came}. All ranks must take the same number "
                "of optimizer steps; if a GradScaler leaves out some on one rank, pass it as scaler="
            )
        if others := minority(anchors):
            return (
                f"rank {', '.join(map(str, others))} began with other weights than the others; before "
                "local_steps load the same on all ranks, or wrap the model in DDP, which sends rank 0's"
            )
        if others := minority(moments):
            return (
                f"rank {', '.join(map(str, others))} has frozen other second moments than the others; freeze "
                "them when the gradients of all steps so far were averaged: at the end of the warm-up"
            )
        return None


@dataclass
class _BufferMean(Strategy):
    async def reduce(self, bucket: Bucket) -> Reduced:
        return Reduced(await all_reduce(bucket.flat, exact=True))


class Completed(NamedTuple):
    """A round whose outcome is known, COMMITTED or SKIPPED, and which this rank has not yet applied."""

    fragment: int
    outcome: State


class Round:
    """A round that has begun: the lane carries its buckets while training may go on."""

    def __init__(self, step: Step, strategy: Strategy, call: Call, device: torch.device) -> None:
        self.fragment = call.fragment
        self._step = step
        self._strategy = strategy
        step.begin(strategy)
        call_roll(step, RollCall("round", call.objection), astuple(call), device)
        self._buffers: list[tuple[list[str], Layout, Future[Tensor]]] = []

    @torch.no_grad()
    def submit_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Their mean is taken in fp32 or wider, whatever the strategy is."""
        for dtype in dict.fromkeys(_wide(buffer) for buffer in buffers.values()):
            names = [name for name, buffer in buffers.items() if _wide(buffer) == dtype]
            chosen = [buffers[name] for name in names]
            flat = torch.cat([buffer.detach().reshape(-1).to(dtype) for buffer in chosen])
            answer = submit_aside(self._step, _BufferMean(), flat, "buffers")
            self._buffers.append((names, layout_of(names, chosen), answer))

    @torch.no_grad()
    def submit_weights(self, buckets: Sequence[WeightBucket], parameters: Parameters) -> None:
        for index, bucket in enumerate(buckets):
            flat, last = bucket.filled(parameters), index == len(buckets) - 1
            self._step.submit(self._strategy, flat, bucket.layout, index=index, is_last=last)

    def complete(self, agreed_buffers: Memory) -> Completed | BaseException:
        """Wait for the lane, then commit, skip or fail the round; the error to raise if it failed."""
        waits_from = time.perf_counter()
        failure = self._step.wait()
        if failure is None:
            for _, layout, answer in self._buffers:
                for slot, mean in layout.views(answer.wait()):
                    agreed_buffers.put(slot.name, mean.clone())  # while it can still be undone
        error = self._step.end(computed_at=waits_from)
        return error or Completed(self.fragment, self._step.state)


def _wide(buffer: Tensor) -> torch.dtype:
    return torch.promote_types(buffer.dtype, torch.float32)
