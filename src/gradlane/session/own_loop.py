"""A strategy at work in a training loop without DDP. ``attach_without_ddp`` makes it."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from ..checkpoint.subject import Parameter
from ..core.strategy import Strategy
from ..errors import WrongState
from ..feed.own_buckets import DEFAULT_BUCKET_MB, bytes_of, checked_bucket_mb, own_buckets
from ..feed.own_loop import OwnLoopFeed
from ..feed.own_model_checks import (
    Parameters,
    checked_group,
    checked_model,
    one_device,
    sparse_names,
    trained_of,
)
from ..feed.tensor_parallel import tensor_parallel_ranks
from ..fsdp_internals import local
from ..lane.one_rank import OneRank
from ..lane.open import Opened
from ..settings import Settings
from ..strategies.as_strategy import as_strategy
from ..strategies.text import describe
from ..torch_internals import uncompiled
from .base import Session
from .tensor_parallel import across_replicas, refuse_options

_open: list[OwnLoop] = []  # one for each model, until it is closed: its memory must outlive the call


class OwnLoop(Session):
    """A strategy at work in a loop without DDP. Made by ``attach_without_ddp``, or by the first
    ``reduce_gradients``; also a context manager that closes."""

    reopen = "call reduce_gradients(model, strategy) or attach_without_ddp(model, strategy)"

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy | str,
        settings: Settings,
        *,
        group: dist.ProcessGroup | OneRank | None = None,
        bucket_mb: float = DEFAULT_BUCKET_MB,
    ) -> None:
        model = checked_model(model)
        if own_loop_of(model) is not None:
            raise WrongState(
                "this model has an attachment already; use its swap(strategy), or close() it first"
            )
        self.bucket_mb = checked_bucket_mb(bucket_mb)
        checked: Any = checked_group(group)
        trained = trained_of(model)
        sparse = sparse_names(model, trained)
        self._group = weakref.ref(checked)
        self._ids = {name: id(parameter) for name, parameter in model.named_parameters()}
        self._trained = list(trained)
        self._requested: object = strategy
        ranks = tensor_parallel_ranks(trained.values(), checked)
        self._tensor_parallel = ranks is not None
        checked, mesh = ranks or (checked, None)
        refuse_options(settings, self._tensor_parallel)
        super().__init__(
            model, model, checked, one_device(trained), self._working(as_strategy(strategy)), settings,
            doing="reduce_gradients", must_agree={"bucket_mb": self.bucket_mb, "sparse": sparse}, mesh=mesh,
        )  # fmt: skip
        limit = bytes_of(self.bucket_mb)
        flags = [name in sparse for name in trained]
        self._buckets = own_buckets(self._trained, list(trained.values()), flags, limit)
        _open.append(self)
        weakref.finalize(model, _forget, weakref.ref(self)).atexit = False

    def _working(self, strategy: Strategy) -> Strategy:
        return across_replicas(strategy) if self._tensor_parallel else strategy

    def _described(self, parameters: list[Parameter]) -> list[Parameter]:
        """With this rank's shapes, which differ from the whole ones under tensor parallelism."""
        model = self._module()
        own = {} if model is None else {name: local(p).shape for name, p in model.named_parameters()}
        return [p._replace(shape=list(own[p.name])) for p in parameters]

    def reduce(self) -> None:
        """What ``reduce_gradients(model)`` does."""
        model = self._module()
        if model is None:
            raise WrongState("the model of this attachment was deleted; attach to the model that you train")
        self._must_be_open()
        parameters = dict(model.named_parameters())
        if (error := self._change_of(parameters)) is not None:
            self._feed.refuse(error, self.strategy)
        else:
            trained = [parameters[name] for name in self._trained]
            self._feed.reduce(self._buckets, trained, self.strategy)

    def swap(self, strategy: Strategy | str) -> None:
        super().swap(strategy)
        self._requested = strategy

    def close(self) -> None:
        super().close()
        self._buckets = []
        if self in _open:
            _open.remove(self)

    def refuse_other(
        self, strategy: Strategy | str, group: dist.ProcessGroup | None, bucket_mb: float, settings: Settings
    ) -> None:
        """Refuse a later call with another strategy or other options than the first one."""
        if strategy is not self._requested and strategy != self._requested:
            requested, own = describe(self._working(as_strategy(strategy))), describe(self.strategy)
            if requested != own:
                raise WrongState(
                    f"{own} reduces the gradients of this model, and this call requests {requested}; on all "
                    "ranks, swap() the strategy of what reduce_gradients returned, or close() it first"
                )
            self._requested = strategy
        same = self._group() is checked_group(group) and self.bucket_mb == bucket_mb
        if not same or self.settings != settings:
            raise WrongState(
                f"this call has other options than the first one, which had bucket_mb={self.bucket_mb:g}, "
                f"{self.settings}; use the same options, or close() what reduce_gradients returned first"
            )

    def _start_feed(self, opened: Opened) -> None:
        self._feed = OwnLoopFeed(self._step, tensor_parallel=self._tensor_parallel)

    def _change_of(self, parameters: Parameters) -> WrongState | None:
        """The error for a parameter that was added, removed, replaced or unfrozen since the ranks agreed."""
        others = [
            name
            for name in self._ids | parameters
            if name not in parameters or self._ids.get(name) != id(parameters[name])
        ]
        if others:
            what = f"{others[0]} is not the parameter that it was"
        else:
            frozen = parameters.keys() - set(self._trained)
            unfrozen = [
                name for name in frozen if parameters[name].requires_grad and parameters[name].numel()
            ]
            if not unfrozen:
                return None
            what = f"{min(unfrozen)} needs a gradient, and was frozen"
        return WrongState(
            f"{what} when the strategy was attached; close() the attachment, and attach again on all ranks"
        )


def own_loop_of(model: nn.Module) -> OwnLoop | None:
    """The open attachment of a model."""
    module = uncompiled(model)
    return next((own for own in list(_open) if own._module() is module), None)


def _forget(own_loop: weakref.ref[OwnLoop]) -> None:
    """The model was collected; in a finalizer, so without waiting."""
    if (found := own_loop()) in _open:
        _open.remove(found)
