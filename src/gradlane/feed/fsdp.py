"""The gradients of FSDP2: what FSDP reduces for one group of parameters is a bucket of a step.

FSDP calls in backward, group by group. Its gradients are views of what it reduces, so that may be filled
later: the lane works while backward goes on. An error that is raised there would leave FSDP in the middle of
a step. It is raised by a callback at the end of backward, after FSDP's own.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Layout, Slot
from ..core.collectives import Kind, Scope, StepSum
from ..core.events import wire_bytes
from ..core.parts import part_name
from ..core.running import intercept
from ..core.scratch import Scratch
from ..core.strategy import Reduced, Strategy
from ..core.subworld import in_scope, within
from ..errors import InvalidValue
from ..fsdp_internals import ShardedParameter, fills_late, with_gradient
from ..strategies.mean import Noop
from ..torch_internals import call_after_backward, current_backward, span
from .copies_apart import CopiesApart
from .step import State, Step


class Contents(NamedTuple):
    """What is in the gradient of a group, in one step: the parameters that have one."""

    layout: Layout
    whole: Layout
    """The same parameters before they are cut."""
    pieces: tuple[bool, ...]
    """Of which of them ranks of other dimensions of the mesh have other pieces."""
    scratch: Scratch


class FsdpGroup:
    """One group of parameters of FSDP."""

    def __init__(self, group: Any, parameters: Sequence[ShardedParameter], place: int, count: int) -> None:
        self._group = weakref.ref(group)
        named = ((part_name(p.name, place, count) if count > 1 else p.name) for p in parameters)
        self._slots = [Slot(name, p.part) for name, p in zip(named, parameters, strict=True)]
        self._whole = [Slot(p.name, torch.Size([p.part[0] * count, *p.part[1:]])) for p in parameters]
        self._pieces = [p.is_piece for p in parameters]
        self._indices: list[int] = []
        self._contents: dict[tuple[int, ...], Contents] = {}

    def look(self) -> None:
        """Before FSDP packs the gradients of this group: see which parameters have one."""
        if (group := self._group()) is not None:
            self._indices = with_gradient(group)

    def fills_late(self, dtype: torch.dtype) -> bool:
        group = self._group()
        return group is not None and fills_late(group, self._indices, dtype)

    def contents(self) -> Contents:
        key = tuple(self._indices)
        if key not in self._contents:
            self._contents[key] = Contents(
                Layout(self._slots[index] for index in key),
                Layout(self._whole[index] for index in key),
                tuple(self._pieces[index] for index in key),
                Scratch(),
            )
        return self._contents[key]


class FsdpFeed:
    """Gives the lane what FSDP reduces, and ends the step at the end of backward."""

    def __init__(
        self,
        step: Step,
        strategy: Callable[[], Strategy],
        *,
        device: torch.device,
        over: Scope,
        peers: int,
        tensor_parallel: bool,
    ) -> None:
        """A plain mean of a bucket would be ``over`` that scope, of so many ``peers``."""
        self.step = step
        step.same_buckets = True
        self._strategy = strategy
        self._device = device
        self._over: Scope = over
        self._peers = peers
        self._tensor_parallel = tensor_parallel
        self._count = 0  # buckets of this step so far
        self._seen: set[int] = set()  # groups of this step so far
        self._late: list[Future[Tensor]] = []  # answers of this step that are filled in later
        self._ended_by: int | None = None  # the backward that will end the step
        self._error: Exception | None = None  # of this rank, before the step began

    def all_reduce(self, group: FsdpGroup, flat: Tensor, *, sums: bool) -> None:
        """FSDP wants the mean of a flat gradient over replicas, in place; with ``sums`` their sum."""
        late = not sums and group.fills_late(flat.dtype)
        scale = self._peers if sums else 1
        self._submit(group, flat, None, scale, late)

    def reduce_scatter(self, group: FsdpGroup, part: Tensor, whole: Tensor, place: int) -> None:
        """FSDP wants this rank's part of the mean. ``whole`` has a part for each rank."""
        part.copy_(whole.view(-1, part.numel())[place])  # it stays if the step fails
        self._submit(group, part, whole, 1, group.fills_late(part.dtype))

    @torch.no_grad()
    def _submit(self, group: FsdpGroup, flat: Tensor, whole: Tensor | None, scale: float, late: bool) -> None:
        if not self._begin(group):
            return
        contents, strategy = group.contents(), self._strategy()
        if self._tensor_parallel:
            strategy = CopiesApart(strategy, contents.pieces)
        if whole is not None:
            strategy = _ReduceScatter(strategy, whole, contents.whole, self._over)
        if not late:
            strategy = _AtOnce(strategy)
        given = flat if whole is None else whole
        kind: Kind = "all_reduce" if whole is None else "reduce_scatter"
        answer = self.step.submit(
            strategy,
            flat,
            contents.layout,
            index=self._count,
            is_last=False,
            finish=partial(_fill, flat, scale),
            scratch=contents.scratch,
            dense_bytes=wire_bytes(kind, given.numel() * given.element_size(), self._peers),
        )
        self._count += 1
        if late:
            self._late.append(answer)
        else:  # FSDP is about to cast, add or move the answer
            with span("wait for the lane"):
                answer.wait()

    def _begin(self, group: FsdpGroup) -> bool:
        """At a group's turn in backward. Whether its gradient is to be submitted."""
        backward = current_backward()
        # A reentrant checkpoint runs a backward inside of another one: its groups belong to the same step. A
        # group that comes again belongs to the next one, although nobody ended the last.
        ended = self._ended_by is None or id(group) in self._seen
        if backward != self._ended_by and (ended or self.step.state is not State.BEGUN):
            self._ended_by, self._error, self._count = backward, None, 0
            self._seen.clear()
            self._late.clear()
            # Queued twice, to come after FSDP's own callbacks: a model may have several roots, and groups
            # whose inputs need no gradient come in those callbacks.
            call_after_backward(lambda: call_after_backward(self._backward_ended))
            try:
                self.step.begin(self._strategy())
            except Exception as error:  # noqa: BLE001  raised at the end, when FSDP is done
                self._error = error
        self._seen.add(id(group))
        return self._error is None

    def _backward_ended(self) -> None:
        self._ended_by = None
        if self._error is not None:
            raise self._error
        if self.step.state is not State.BEGUN:
            return
        computed_at = time.perf_counter()
        nothing = torch.empty(0, device=self._device)
        # FSDP does not say which group is the last one, so the step ends with an empty bucket.
        self.step.submit(Noop(), nothing, Layout(()), index=self._count, is_last=True)
        with span("wait for the lane"):
            self.step.wait()
            for answer in self._late:  # on another device this orders streams: nobody may read it before
                answer.wait()
        self._late.clear()
        error = self.step.end(computed_at)
        if error is not None:
            raise error


def _fill(flat: Tensor, scale: float, mean: Tensor) -> Tensor:
    """Write an answer to where FSDP wants it."""
    if mean.data_ptr() != flat.data_ptr():
        flat.copy_(mean)
    return flat.mul_(scale) if scale != 1 else flat


@dataclass
class _ReduceScatter(Strategy):
    """This rank's part of what ``inner`` makes of all ranks' ``whole``, over the ranks of a scope."""

    inner: Strategy
    whole: Tensor
    layout: Layout
    over: Scope

    async def reduce(self, bucket: Bucket) -> Reduced:
        given = replace(bucket, flat=self.whole, layout=self.layout)
        if self.over == "world":
            return Reduced(await self.inner.scatter(given))
        given = within(given, self.over, self.whole, self.layout)
        return Reduced(await in_scope(self.inner.scatter(given), self.over))


@dataclass
class _AtOnce(Strategy):
    """Refuses what could not end before later buckets have come."""

    inner: Strategy

    async def reduce(self, bucket: Bucket) -> Reduced:
        return await intercept(self.inner.reduce(bucket), _pass_on, self._refuse)

    async def _refuse(self, part: StepSum) -> Tensor:
        raise InvalidValue(
            f"{type(self.inner).__name__} needs the gradients of all groups before it can answer for one, "
            "and FSDP wants this answer at once: to add it to an earlier gradient, or to cast it. Clear "
            "gradients before each backward that synchronises (set_requires_gradient_sync), and let "
            "MixedPrecisionPolicy(reduce_dtype=...) be the dtype of the parameters"
        )


async def _pass_on(request: Any) -> object:
    return await request
