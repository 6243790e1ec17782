"""Training loops without DDP: ``reduce_gradients`` after backward."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from .core.numbers import is_number
from .core.strategy import Strategy
from .errors import InvalidValue, WrongState
from .feed.nonfinite import Guard
from .feed.own_buckets import parcels
from .feed.own_loop import OwnFeed
from .feed.own_model import (
    Parameters,
    checked_group,
    checked_model,
    one_device,
    sparse_names,
    trained_of,
    uncompiled,
)
from .lane.one_rank import OneRank
from .lane.open import Opened
from .session import Session
from .settings import ScaledOptions, Settings, settings_of
from .strategies.as_strategy import as_strategy
from .strategies.text import describe

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

DEFAULT_BUCKET_MB = 25.0  # DDP's

_kept: list[Reducer] = []  # one for each model, until it is closed: its memory must outlive the call


class Reducer(Session):
    """A strategy at work on a model without DDP; one for each model. ``reduce`` after every backward.

    Call it on every rank of the group, when the model has its parameters. All ranks compare library version,
    strategy and options, and parameters; if anything differs all of them raise ``RanksDisagree`` and name it.
    The weights must be the same on all ranks, and it is yours to see to that; DDP sends those of rank 0.

    Args:
        model: any module; the gradients of all its parameters that are not frozen are reduced.
        strategy: a strategy, or its text: ``"ErrorFeedback(Sharded(Int8()))"``.
        group: the process group; the default one if None.
        bucket_mb: buckets are closed once they hold this much.

    The other ``options`` are those of ``attach``.
    """

    kind = "reducer"
    again = "make another Reducer"
    _feed: OwnFeed

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy | str,
        *,
        group: dist.ProcessGroup | OneRank | None = None,
        bucket_mb: float = DEFAULT_BUCKET_MB,
        **options: Unpack[ScaledOptions],
    ) -> None:
        model = checked_model(model)
        if reducer_of(model) is not None:
            raise WrongState("this model has a reducer already; use its swap(strategy), or close() it first")
        if not is_number(bucket_mb) or not 0 < bucket_mb < math.inf:
            raise InvalidValue(
                f"bucket_mb={bucket_mb!r} holds nothing, or no end of it; use a number above 0, 25 by default"
            )
        settings = settings_of(**options)
        group = checked_group(group)
        trained = trained_of(model)
        sparse = sparse_names(model, trained)
        self.bucket_mb = float(bucket_mb)
        self._group = weakref.ref(group)
        self._who = {name: id(parameter) for name, parameter in model.named_parameters()}
        self._trained = list(trained)
        self._asked: object = strategy
        super().__init__(
            model, model, group, one_device(trained), as_strategy(strategy), settings,
            doing="reduce_gradients", must_agree={"bucket_mb": self.bucket_mb, "sparse": sparse},
        )  # fmt: skip
        limit = max(1, int(self.bucket_mb * 2**20))
        flags = [name in sparse for name in trained]
        self._parcels = parcels(self._trained, list(trained.values()), flags, limit)
        _kept.append(self)
        weakref.finalize(model, _drop, weakref.ref(self)).atexit = False

    def reduce(self) -> None:
        """Make ``p.grad`` of every parameter what all ranks agree on. Call it after backward, once a step.

        A gradient that is missing on some ranks counts as zeros there; where all lack it, it stays None.
        Errors are raised here, on all ranks, and leave ``p.grad`` as it was.
        """
        model = self._module()
        if model is None:
            raise WrongState("the model of this reducer is gone; make another one for the model you train")
        self._must_be_open()
        self._step_begins()
        now = dict(model.named_parameters())
        if (wrong := self._changed(now)) is not None:
            self._feed.refuse(wrong, self.strategy)
        else:
            self._feed.reduce(self._parcels, [now[name] for name in self._trained], self.strategy)

    def swap(self, strategy: Strategy | str) -> None:
        super().swap(strategy)
        self._asked = strategy

    def close(self) -> None:
        super().close()
        self._parcels = []
        if self in _kept:
            _kept.remove(self)

    def must_be(
        self, strategy: Strategy | str, group: dist.ProcessGroup | None, bucket_mb: float, settings: Settings
    ) -> None:
        """Refuse a call that asks for anything else than what is at work."""
        if strategy is not self._asked and strategy != self._asked:
            asked, mine = describe(as_strategy(strategy)), describe(self.strategy)
            if asked != mine:
                raise WrongState(
                    f"the gradients of this model go by {mine}, this call asks for {asked}; reduce_gradients "
                    "returned the reducer: swap() its strategy on all ranks, or close() it to begin anew"
                )
            self._asked = strategy
        same = self._group() is checked_group(group) and self.bucket_mb == bucket_mb
        if not same or self.settings != settings:
            raise WrongState(
                f"this call has other options than the first one, which had bucket_mb={self.bucket_mb:g}, "
                f"{self.settings}; options stay as they are: close() the reducer to begin anew"
            )

    def _fed(self, opened: Opened, guard: Guard) -> OwnFeed:
        return OwnFeed(opened.lane, self._ledger, rank=opened.rank, sizes=opened.sizes, guard=guard)

    def _changed(self, now: Parameters) -> WrongState | None:
        """Parameters that came, went or thawed since the ranks agreed: their gradients would not travel."""
        others = [name for name in self._who | now if name not in now or self._who.get(name) != id(now[name])]
        if others:
            what = f"{others[0]} is not the parameter that it was"
        else:
            frozen = now.keys() - set(self._trained)
            thawed = [name for name in frozen if now[name].requires_grad and now[name].numel()]
            if not thawed:
                return None
            what = f"{min(thawed)} is to be trained, and was frozen"
        return WrongState(f"{what} when the reducer was made; close() it, and make another one on all ranks")


def reduce_gradients(
    model: nn.Module,
    strategy: Strategy | str,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_mb: float = DEFAULT_BUCKET_MB,
    **options: Unpack[ScaledOptions],
) -> Reducer:
    """Make ``p.grad`` of every parameter what all ranks agree on: ``Reducer.reduce`` in one line.

    Call it after backward, once a step, on every rank. The first call makes the model's ``Reducer``, later
    ones use it, with the same strategy and options; it is returned, for its metrics and checkpoints.
    ``Reducer`` says what the arguments are.
    """
    reducer = reducer_of(model)
    if reducer is None:
        reducer = Reducer(model, strategy, group=group, bucket_mb=bucket_mb, **options)
    else:
        reducer.must_be(strategy, group, bucket_mb, settings_of(**options))
    reducer.reduce()
    return reducer


def reducer_of(model: nn.Module) -> Reducer | None:
    return next((reducer for reducer in list(_kept) if reducer._module() is uncompiled(model)), None)


def _drop(reducer: weakref.ref[Reducer]) -> None:
    """Its model is gone, and its lane about to go; in a finalizer, so without waiting."""
    if (dropped := reducer()) in _kept:
        _kept.remove(dropped)
