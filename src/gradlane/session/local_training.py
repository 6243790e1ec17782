"""Local steps at work on a model: a session whose steps are rounds."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.subject import Parameter
from ..core.events import wire_bytes
from ..core.strategy import Strategy
from ..errors import InvalidValue, WrongState
from ..feed.adam_moments import check_adam
from ..feed.loss_scale import Scaler, checked_scaler
from ..feed.optimizer_hooks import OptimizerHooks
from ..feed.own_buckets import DEFAULT_BUCKET_MB, bytes_of, checked_bucket_mb
from ..feed.own_model_checks import checked_group, one_device, trained_of
from ..feed.step_counter import StepCounter, refuse_uncounted
from ..feed.weight_buckets import fragments_of
from ..lane.one_rank import OneRank
from ..lane.open import Opened
from ..settings import Settings
from ..strategies.as_strategy import as_strategy
from ..strategies.local_steps import LocalSteps
from ..torch_internals import uncompiled
from .base import Session, weakly
from .gradient_exchange import GradientExchange
from .local_figures import local_figures
from .local_position import Position
from .local_rounds import LocalRounds
from .local_weights import LocalWeights, anchor_of
from .rank_state import RankState, cloned


class LocalTraining(Session):
    """Local steps at work on one model. Made by ``local_steps``; also a context manager, which takes a last
    round before it closes, unless the block raised.

    ``step`` counts rounds; ``local_steps`` counts the steps of the optimizer.
    """

    reopen = "call local_steps again"
    gives = "weights"
    strategy: LocalSteps

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: LocalSteps,
        settings: Settings,
        *,
        group: dist.ProcessGroup | OneRank | None = None,
        bucket_mb: float = DEFAULT_BUCKET_MB,
        gradients: Session | None = None,
        keep_gradients: bool = False,
        inside: str | None = None,
    ) -> None:
        """``gradients`` reduces gradients in the warm-up, and with ``keep_gradients`` afterwards too."""
        ddp = model if isinstance(model, DistributedDataParallel) else None
        module = model if ddp is None else ddp.module
        trained = trained_of(module)
        bucket_mb = checked_bucket_mb(bucket_mb)
        refuse_uncounted(optimizer, trained)
        if strategy.moments == "frozen":
            check_adam(optimizer)
        checked: Any = checked_group(group) if ddp is None else ddp.process_group
        self.local_steps = 0
        """How many steps the optimizer has taken."""
        self._gradients = GradientExchange(ddp, gradients, keep_gradients)
        self._weights = LocalWeights(module, trained, strategy.anchor, strategy.agreed_buffers)
        self._dense_bytes = sum(p.numel() * p.element_size() for p in trained.values())
        device = one_device(trained)
        strategy.anchor.load_state_dict(anchor_of(trained))
        strategy.agreed_buffers.load_state_dict({})  # an earlier training may have left some
        super().__init__(
            model, module, checked, device, strategy, settings, doing="local_steps",
            must_agree={"bucket_mb": bucket_mb, "inside": inside},
        )  # fmt: skip
        fragments = fragments_of(trained, strategy, bytes_of(bucket_mb))
        self._rounds = LocalRounds(self._step, self._weights, fragments, optimizer, device)
        local, own = strategy.local, weakref.ref(self)  # the strategy must not keep this object
        self._rank_state = rank_state = RankState(
            self._weights, optimizer, weakly(self._scaler, default=None)
        )
        local.collect = lambda: (
            {} if (me := own()) is None else rank_state.collect(me._rounds.position(me.local_steps))
        )
        local.refuse = rank_state.refuse
        self._counter = StepCounter(
            optimizer, settings.scaler,
            before_step=weakly(self._before_step, default=None),
            after_step=weakly(self._after_step, default=None),
        )  # fmt: skip
        if strategy.warmup == 0:
            self._gradients.stop()
        _open[model] = self

    # Rounds

    def _before_step(self, closure: bool) -> None:
        if self._weights.showing_agreed:
            raise WrongState("optimizer.step() inside of agreed(), where the weights are not this rank's own")
        self._gradients.reduce(closure)

    def _after_step(self) -> None:
        self.local_steps += 1
        if self.local_steps == self.strategy.warmup:
            self._weights.make_anchor()
            self._gradients.stop()
            if self.strategy.moments == "frozen":
                self._rounds.freeze_moments()
        if self.strategy.due(self.local_steps) is not None:
            self._must_be_open()
        self._rounds.after_step(self.strategy, self.local_steps)

    def finish(self) -> None:
        """Take a last round, of the whole model: all ranks then have the same weights. Collective."""
        self._must_be_open()
        self._must_not_show_agreed("finish")
        self._rounds.apply(self.strategy)
        if self.local_steps >= self.strategy.warmup:
            self._rounds.begin(self.strategy, self.local_steps)
            self._rounds.apply(self.strategy)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """``with local.agreed(): evaluate(model)``: the model has the weights and buffers of the last round,
        which are the same on all ranks, and this rank's own again afterwards."""
        self._must_not_show_agreed("agreed")
        if self.local_steps < self.strategy.warmup:  # all ranks have the same weights after every step
            yield
            return
        self._rounds.complete(self.strategy)
        with self._weights.agreed_for_a_while():
            yield

    # The parts of Session that differ

    def _start_feed(self, opened: Opened) -> None:
        """A round begins after a step of the optimizer; no hook feeds it."""

    def _watch_optimizers(self, module: nn.Module) -> OptimizerHooks | None:
        return None  # a skipped round takes weights back, and leaves gradients alone

    def _loss_scaler(self) -> Scaler | None:
        return None  # weights are not scaled

    def _described(self, parameters: list[Parameter]) -> list[Parameter]:
        """Strategies see differences of weights in fp32 or wider."""
        narrow = ("float16", "bfloat16")
        return [p._replace(dtype="float32") if p.dtype in narrow else p for p in parameters]

    def _replicated(self) -> dict[str, Tensor]:
        return self.strategy.anchor.state_dict()

    def _next_layout(self) -> list[list[str]]:
        return []  # buckets follow from the options

    def stop_gradients(self) -> None:
        """Switch DDP's exchange off again if this is a local step. A framework may have switched it on."""
        if self.local_steps >= self.strategy.warmup:
            self._gradients.stop()

    def _scaler(self) -> Scaler | None:
        """For checkpoints, which may be saved after ``close``."""
        return self.settings.scaler if self._counter.scaler is None else self._counter.scaler

    @property
    def scaler(self) -> Scaler | None:
        return self._counter.scaler

    @scaler.setter
    def scaler(self, scaler: Scaler | None) -> None:
        self._counter.scaler = checked_scaler(scaler)

    def swap(self, strategy: Strategy | str) -> None:
        """Use another strategy inside from the next round on. Anchor and position stay."""
        given = as_strategy(strategy)
        if isinstance(given, LocalSteps):
            raise InvalidValue(
                "swap takes what is inside of LocalSteps; for other options close(), then call local_steps"
            )
        self._rounds.complete(self.strategy)
        super().swap(self.strategy.with_inner(given))

    def metrics(self) -> dict[str, float]:
        """Those of every session, where a step is a round, and:

        - ``local/steps``, ``local/rounds``: steps of the optimizer, and rounds.
        - ``local/bytes_per_step``: sent by this rank, with all bytes of the warm-up.
        - ``local/ratio``: how many times as much DDP would have sent.
        - ``local/drift``: how far this rank was from the mean before the last round, relative to what the
          round changed. ``local/cosine``: between the changes of the last two rounds.
        """
        dense = wire_bytes("all_reduce", self._dense_bytes, self._scopes.world)
        gradients = self._gradients.bytes_wire(dense * min(self.local_steps, self.strategy.warmup))
        return local_figures(super().metrics(), self.local_steps, dense, gradients)

    def close(self) -> None:
        super().close()
        self._counter.close()
        self._gradients.close()

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None and self.is_open:
                self.finish()
        finally:
            self.close()

    # Checkpoints

    def save(self, path: str | os.PathLike[str], *, timeout: float | timedelta | None = None) -> None:
        """Write a checkpoint, after any step: the memory of the strategy, and of each rank its own weights,
        buffers and optimizer state. The schedule of the learning rate and the position in the data are yours
        to save. Otherwise as ``Attachment.save``."""
        self._must_not_show_agreed("save")
        self._rounds.complete(self.strategy)
        super().save(path, timeout=timeout)

    def load(
        self, path: str | os.PathLike[str], strict: bool = True, *, timeout: float | timedelta | None = None
    ) -> None:
        """Continue where ``save`` was called, bit for bit: it loads weights, buffers and optimizer too.
        Another number of ranks continues from the weights of the last round."""
        self._must_not_show_agreed("load")
        self._rounds.complete(self.strategy)
        super().load(path, strict, timeout=timeout)
        self._take_loaded()

    def state_dict(self) -> dict[str, Any]:
        self._rounds.complete(self.strategy)
        found = super().state_dict()
        return found | {"layout": [], "state": cloned(found["state"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rounds.complete(self.strategy)
        super().load_state_dict(state)
        self._take_loaded()

    def _take_loaded(self) -> None:
        """All ranks have read and checked their states."""
        state, self.strategy.local.loaded = self.strategy.local.loaded, None
        if not state:
            return
        position = Position.read(state["position"])
        self.local_steps = position.steps
        self._rank_state.load(state)
        self._rounds.go_to(position, same_ranks="weights" in state)
        self.stop_gradients()

    def _must_not_show_agreed(self, doing: str) -> None:
        if self._weights.showing_agreed:
            raise WrongState(f"{doing} inside of agreed(); call it outside of the block")


_open: weakref.WeakKeyDictionary[nn.Module, LocalTraining] = weakref.WeakKeyDictionary()


def local_training_of(model: nn.Module) -> LocalTraining | None:
    """The open local training of a model."""
    found = _open.get(uncompiled(model))
    return found if found is not None and found.is_open else None
