"""DDP's buckets become buckets of a step.

DDP turns an exception of a hook, or of its future, into one of its own, and is unusable afterwards. So the
lane completes its futures whatever happens. The error is raised by a callback at the end of backward, after
DDP's own callback has completed its book-keeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ..core.bucket import Bucket, Layout
from ..core.collectives import Request, all_reduce
from ..core.running import intercept
from ..core.strategy import Reduced, Strategy
from ..errors import WrongState
from ..lane.base import same
from ..torch_internals import call_after_backward, current_backward, span
from .copies_apart import CopiesApart
from .layout import layout_of
from .plain_ddp import PlainDdp
from .row_major import RowMajorCopy, row_major_copy
from .step import State, Step
from .tensor_parallel import pieces_of

NameOf = Callable[[int, int, Tensor], str]
"""The name of a parameter, by its bucket and its index there."""


class _Contents(NamedTuple):
    """What is in one of DDP's buckets."""

    parameters: tuple[int, ...]  # their ids
    layout: Layout
    row_major: RowMajorCopy | None
    pieces: tuple[bool, ...]  # of which of them other ranks have other pieces: tensor parallelism


class DdpFeed:
    """Translates DDP's buckets, and ends the step at the end of backward."""

    def __init__(
        self,
        step: Step,
        *,
        name_of: NameOf,
        divides_by_active: Callable[[], bool] = lambda: False,
        tensor_parallel: bool = False,
    ) -> None:
        self.step = step
        self._name_of = name_of
        self._divides_by_active = divides_by_active
        self._tensor_parallel = tensor_parallel
        self.raises_at_once: Callable[[BaseException], bool] = lambda failure: False
        """Whether an error must not wait for DDP's own callback, because that would hang."""
        self.plain: PlainDdp | None = None
        """Takes the steps that need no strategy."""
        self._is_plain = False  # this step
        self._counts_active = False  # in this step
        self._ended_by: int | None = None  # the backward that will end the step
        self._contents: dict[int, _Contents] = {}  # by bucket

    def reduce(self, bucket: dist.GradBucket, strategy: Strategy) -> Future[Tensor]:
        if bucket.index() == 0:
            self._is_plain = self.plain is not None and self.plain.takes_step()
        if self._is_plain and self.plain is not None:
            return self.plain.reduce(bucket, self._contents_of(bucket).layout)
        backward = current_backward()
        joined = backward is None  # outside of backward DDP shadows the others for a joined rank
        # A compat hook may serve two models: buckets of one may come after the last bucket of the other.
        if bucket.index() == 0 or self.step.state is not State.BEGUN:
            self.step.begin(strategy, joined=joined)
            self._counts_active = self._divides_by_active()
            if self._counts_active and self._tensor_parallel:
                raise WrongState(
                    "join(divide_by_initial_world_size=False) is not possible with tensor parallelism"
                )
        contents = self._contents_of(bucket)
        flat, finish = bucket.buffer(), same
        if contents.row_major is not None:
            finish = partial(contents.row_major.write_back, into=flat)
            flat = contents.row_major.read(flat)
        if not joined and backward != self._ended_by:
            call_after_backward(self._backward_ended)
            self._ended_by = backward
        if self._tensor_parallel:
            strategy = CopiesApart(strategy, contents.pieces)
        answer = self.step.submit(
            _MeanOfActive(strategy) if self._counts_active else strategy,
            flat,
            contents.layout,
            index=bucket.index(),
            is_last=bucket.is_last(),
            finish=finish,
            raises=joined,  # DDP waits for the future then, and raises its error
        )
        if bucket.is_last() and joined:
            self._end_joined()
        return answer

    def _backward_ended(self) -> None:
        """Wait for the lane and end the step; raise what failed it.

        A reentrant checkpoint runs a backward of its own inside of another one. If more buckets must come,
        the step does not end with it: an error there would leave DDP in the middle of a step.
        """
        if self.step.state is not State.SUBMITTED:
            return
        computed_at = time.perf_counter()
        if self.step.postpone(computed_at):
            return
        with span("wait for the lane"):
            self.step.wait()
        error = self.step.end(computed_at)
        if error is not None and self.raises_at_once(error):
            raise error
        if error is not None:
            # DDP's own callback was queued after this one. A callback that is queued now comes after both.
            call_after_backward(partial(_raise, error))

    def _end_joined(self) -> None:
        """A joined rank has no backward that could end its step. DDP waits for the step here anyway."""
        failure = self.step.wait()
        error = self.step.end(time.perf_counter())
        if error is not None and error is not failure:  # DDP finds the failure in the futures
            raise error

    def expect(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """The next step has these parameters in its buckets; without any, the same as the last step."""
        if buckets:
            self.step.expect([self._names(i, parameters) for i, parameters in enumerate(buckets)])

    def _contents_of(self, bucket: dist.GradBucket) -> _Contents:
        """Computed once for each bucket, and again when DDP has rebuilt its buckets."""
        parameters, index = bucket.parameters(), bucket.index()
        ids = tuple(map(id, parameters))
        known = self._contents.get(index)
        if known is not None and known.parameters == ids:
            return known
        if known is not None:
            self.step.forget_buckets()
        layout = layout_of(self._names(index, parameters), parameters)
        contents = _Contents(ids, layout, row_major_copy(parameters, bucket.buffer()), pieces_of(parameters))
        self._contents[index] = contents
        return contents

    def _names(self, index: int, parameters: Sequence[Tensor]) -> list[str]:
        return [self._name_of(index, position, parameter) for position, parameter in enumerate(parameters)]


def _raise(error: BaseException) -> None:
    raise error


@dataclass
class _MeanOfActive(Strategy):
    """For ``join(divide_by_initial_world_size=False)``: a mean divides by the ranks that still train."""

    inner: Strategy

    async def reduce(self, bucket: Bucket) -> Reduced:
        active = torch.full((1,), 0 if bucket.joined else 1, device=bucket.flat.device)
        total = await all_reduce(active, op="sum")
        count = bucket.world if total.is_meta else int(total)
        if count == 0:
            raise WrongState("no rank is still training; leave the join() context")

        async def answer(request: Request) -> object:
            if request.op != "mean" or request.over != "world":
                return await request
            return await all_reduce(request.payloads[0][0].div_(count), op="sum")

        inner = self.inner.reduce(replace(bucket, sizes={**bucket.sizes, "world": count}))
        return await intercept(inner, answer)
