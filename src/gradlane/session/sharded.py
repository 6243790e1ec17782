"""A strategy at work on a model of FSDP2. ``attach`` in ddp.py makes it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..agree.compare import as_note, objection, refuse_objections
from ..agree.limits import limit_of_group
from ..checkpoint.subject import Parameter, slots_of
from ..core.collectives import Scope
from ..core.strategy import Strategy, parts
from ..errors import InvalidValue, RanksDisagree
from ..feed.fsdp import FsdpFeed, FsdpGroup
from ..feed.fsdp_comms import ALL_GATHER, REDUCE_SCATTER, Carrier, FsdpWaits, ScatterComm, WatchedComm
from ..feed.fsdp_model import FsdpModel
from ..feed.optimizer_hooks import OptimizerHooks
from ..fsdp_internals import (
    before_post_backward,
    reduces,
    replace_all_gather,
    replace_reduce_scatter,
    replace_replicate_group,
    replicate_group,
    shard_group,
)
from ..lane.open import Opened
from ..lane.thread import ThreadLane
from ..log import log
from ..settings import Settings
from ..strategies.across_replicas import AcrossReplicas
from ..strategies.hierarchical import Hierarchical
from ..strategies.text import describe, saved_by
from ..strategies.weighted import WeightedMean
from ..torch_internals import uncompiled
from .base import Session, weakly

if TYPE_CHECKING:
    from .distributed_state import MeshState


class ShardedAttachment(Session):
    """A strategy at work on a model of FSDP2. Made by ``attach``; also a context manager that closes.

    With replicas (HSDP, ``replicate()``) the strategy carries each rank's shard across them. Without, it is
    the reduce-scatter itself. After ``close`` torch's own collectives are back.
    """

    reopen = "attach again"

    def __init__(self, model: nn.Module, strategy: Strategy, settings: Settings) -> None:
        self._model = FsdpModel(model)
        if settings.ranks_per_node is not None and self._model.carries == "replicas":
            raise InvalidValue(
                f"ranks_per_node={settings.ranks_per_node}: the mesh of this model says which ranks are a "
                "node; leave it out"
            )
        self._undo: list[Callable[[], None]] = []
        self._loads = 0  # calls of ``load_distributed``
        self.on_close: Callable[[], None] = lambda: None
        """Set by ``attach``: what else is to do at close."""
        group, mesh = self._model.ranks()
        inner = uncompiled(model)
        super().__init__(
            inner, inner, group, self._model.device, self._working(strategy), settings, doing="attach",
            must_agree={"mesh": self._model.text}, mesh=mesh,
        )  # fmt: skip
        self._warn_of_others(inner)
        try:
            self._refuse_other_weights()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.on_close()
        while self._undo:
            self._undo.pop()()
        super().close()

    def distributed_state(self) -> dict[str, Tensor]:
        """The step and the memory of the strategy as DTensors, for torch's distributed checkpoint:
        ``dcp.save({"model": ..., "gradlane": attachment.distributed_state()}, checkpoint_id=folder)``."""
        self._must_be_between_steps("distributed_state")
        self._step.finish()
        about = {"step": self.step, "strategy": describe(self.strategy, shared_only=True)}
        return self._mesh_state().saved(self._across_replicas(), about)

    def load_distributed(self, path: str | os.PathLike[str], *, key: str = "gradlane") -> None:
        """Continue from what ``dcp.save`` wrote of ``distributed_state()``, on a mesh of any size. Call it on
        every rank; if one refuses, all do, and nothing changes."""
        self._must_be_open()
        strategy, own = self._across_replicas(), self.strategy
        before = own.state_dict()
        refusal = objection(lambda: self._take(strategy, Path(path), key))
        doing, self._loads = "load_distributed", self._loads + 1
        _, notes = self._board.agree(f"{doing}{self._loads}", {"objection": as_note(refusal)}, doing=doing)
        try:
            refuse_objections(notes, refusal, doing)
        except BaseException:
            own.load_state_dict(before)
            raise

    def _take(self, strategy: AcrossReplicas, path: Path, key: str) -> None:
        said, state = self._mesh_state().loaded(strategy, path, key)
        if not saved_by(self.strategy, said["strategy"]):
            raise InvalidValue(
                f"it was saved by {said['strategy']}, this run has {describe(self.strategy)}; attach the "
                "strategy that saved it, and swap() afterwards"
            )
        self._state.load_state(self.strategy, state, said["step"])

    def _across_replicas(self) -> AcrossReplicas:
        if isinstance(self.strategy, AcrossReplicas) and not self._model.tensor_parallel:
            return self.strategy
        raise InvalidValue(
            f"{describe(self.strategy, short=True)} has no state across replicas that torch's distributed "
            "checkpoint could hold; use attachment.save(folder) and load(folder)"
        )

    def _mesh_state(self) -> MeshState:
        from .distributed_state import MeshState  # with torch's checkpoints, which take long to import

        mesh = next(iter(self._model.own().values())).device_mesh
        return MeshState(mesh, self._model.place, self._model.count, slots_of(self._parameters))

    def _working(self, strategy: Strategy) -> Strategy:
        """The strategy as it works on shards."""
        if self._model.carries == "shards":
            return self._scattering(strategy)
        if isinstance(strategy, AcrossReplicas):
            return strategy
        if any(isinstance(part, Hierarchical) for part in parts(strategy)):
            raise InvalidValue(
                "Hierarchical on a model with replicas: FSDP has the node's part already. Attach what is "
                "inside: attach(model, 'ErrorFeedback(Sharded(Int4()))') carries shards across replicas"
            )
        weighted = any(isinstance(part, WeightedMean) for part in parts(strategy))
        if weighted and self._model.count == 1 and not self._model.tensor_parallel:
            return strategy  # its world are the replicas, each of which is one rank with a weight of its own
        return AcrossReplicas(strategy)

    def _scattering(self, strategy: Strategy) -> Strategy:
        if not strategy.scatters:
            raise InvalidValue(
                f"{type(strategy).__name__} cannot be the reduce-scatter of FSDP: it answers with the whole "
                "gradient, and remembers as much. Use Mean(), Cast(Mean(), bfloat16), Sharded(codec) or "
                "WeightedMean of these; or give the model replicas, across which every strategy works: "
                "fully_shard(model, mesh=init_device_mesh('cpu', (replicas, shards)))"
            )
        return strategy

    def _watch_optimizers(self, module: nn.Module) -> OptimizerHooks:
        # Between two steps a module may have whole parameters instead of those that the optimizer has.
        found = self._model.finders()
        for name, parameter in module.named_parameters():
            found.setdefault(name, weakref.ref(parameter))  # one that FSDP ignores
        return OptimizerHooks(found.items(), weakly(self._synced, default=True), adds_means=True)

    def _described(self, parameters: list[Parameter]) -> list[Parameter]:
        """With the dtype of the gradient that FSDP reduces, which may be wider than the parameter."""
        return [
            Parameter(p.name, list(p.shape), str(p.dtype).removeprefix("torch."), p.trained)
            for group in self._model.parameters
            for p in group
        ]

    def _start_feed(self, opened: Opened) -> None:
        model, own = self._model, weakref.ref(self)

        def strategy() -> Strategy:
            session = own()
            assert session is not None
            return session.strategy

        over: Scope = "cross" if model.carries == "replicas" or model.tensor_parallel else "world"
        self.feed = FsdpFeed(
            self._step, strategy, device=model.device, over=over, peers=opened.scopes.sizes[over],
            tensor_parallel=model.tensor_parallel,
        )  # fmt: skip
        waits = self._watch_torch(opened)
        for group, parameters in zip(model.groups, model.parameters, strict=True):
            of = FsdpGroup(group, parameters, model.place, model.count)
            self._undo.append(before_post_backward(group, of.look))
            if waits is not None:
                self._undo.append(
                    replace_all_gather(group, partial(WatchedComm, waits=waits, doing=ALL_GATHER))
                )
            if model.carries == "replicas":
                carrier = Carrier(replicate_group(group), self.feed, of)
                self._undo.append(replace_replicate_group(group, carrier))
                if waits is not None:
                    watched = partial(WatchedComm, waits=waits, doing=REDUCE_SCATTER)
                    self._undo.append(replace_reduce_scatter(group, watched))
            else:
                comm = partial(ScatterComm, feed=self.feed, group=of, place=model.place)
                self._undo.append(replace_reduce_scatter(group, comm))

    def _watch_torch(self, opened: Opened) -> FsdpWaits | None:
        shards = shard_group(self._model.groups[0])
        if not isinstance(opened.lane, ThreadLane) or shards is None:
            return None
        of_group = limit_of_group(shards, self._model.device)
        waits = FsdpWaits(shards, opened.lane, self._step, limit=opened.board.limit, of_group=of_group)
        opened.lane.when_idle = waits.check
        return waits

    def _warn_of_others(self, module: nn.Module) -> None:
        """Parameters that no ``fully_shard`` call took: each rank has gradients of its own for them."""
        known = self._model.own()
        ids = {id(own) for own in known.values()}
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        if others := [name for name, p in trained if name not in known and id(p) not in ids]:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            log.warning(
                "attach: %s%s is trained, and outside of FSDP: nobody reduces its gradient. Call "
                "fully_shard(model) on the whole model last, or reduce it yourself",
                others[0],
                more,
            )

    def _refuse_other_weights(self) -> None:
        """FSDP sends nobody's weights when it shards a model: replicas that differ would never be equal."""
        found = self._drift(1, self._step.lane).differing(self.step)
        if isinstance(found, BaseException):
            raise found
        if found is not None:
            who, what = found
            raise RanksDisagree(
                f"attach: rank {who} of {self._scopes.world} has other weights than its replicas, in {what}; "
                "FSDP sends nobody's weights, so seed all ranks alike before the model is made, or load one "
                "checkpoint on all of them"
            )

    def _alike(self) -> list[list[int]]:
        return self._model.alike

    def _synced(self) -> bool:
        return any(map(reduces, self._model.groups))

    def _replicated(self) -> dict[str, Tensor]:
        return self._model.weights()

    def _next_layout(self) -> list[list[str]]:
        return []  # FSDP's groups are the same in every step
