"""What a rank that has failed a step still sends in it: zeros, where the others wait for its payloads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.bucket import Bucket
from ..core.collectives import Note, Payload, Request, Scope
from ..core.running import Driver, Running
from ..core.strategy import Reduced
from ..simulate.dryrun import answer_like
from .perform import perform_on_stream
from .requests import Job


class _Shadow(Running):
    """A bucket of the failed step on meta tensors, without the numbers of its strategy's state."""

    def __init__(self, job: Job) -> None:
        flat = torch.empty_like(job.bucket.flat, device="meta")
        with _ToMeta():
            strategy = copy.deepcopy(job.strategy)
        super().__init__(strategy, replace(job.bucket, flat=flat, scratch=None), _ignore)
        self.device = job.bucket.flat.device
        self.performed = job.performed


class StandIn(Driver[_Shadow]):
    """Runs the strategies of a failed step on meta tensors, only to learn which requests follow.

    On NCCL a rank cannot leave a step: the others would pair its next collective with another one of theirs,
    or wait for ever. Zeros are valid in every codec, and the step is undone on all ranks.
    """

    def __init__(self, group_of: Callable[[Scope], Any]) -> None:
        self._group_of = group_of
        self._shadows: list[_Shadow] = []

    def take_over(self, job: Job) -> None:
        """Go on where a bucket stopped; one that has not begun is run from its beginning."""
        shadow = _Shadow(job)
        self._shadows.append(shadow)
        shadow.resume()
        self.advance(shadow)

    def end(self) -> None:
        """The step has no more buckets."""
        self.meet(self._shadows)

    def perform(self, running: _Shadow, request: Request) -> object:
        group = self._group_of(request.over)
        if running.phase >= running.performed:
            zeros = tuple(_zeros(payload, running.device) for payload in request.payloads)
            perform_on_stream(group, replace(request, payloads=zeros), 1)
        return answer_like(request, group.size())

    def finished(self, running: _Shadow, reduced: Reduced) -> None:
        """The result has no numbers."""


def _zeros(payload: Payload, device: torch.device) -> Payload:
    return tuple(torch.zeros_like(part, device=device) for part in payload)


class _ToMeta(TorchFunctionMode):
    """Copies of tensors are on meta: they have shapes, and need no memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__deepcopy__:
            return torch.empty_like(args[0], device="meta")
        return function(*args, **(kwargs or {}))


def _ignore(bucket: Bucket, note: Note) -> None:
    """Metrics count what was sent with numbers."""
