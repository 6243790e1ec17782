"""Opening a session: all ranks check the strategy and compare what must be the same, then connect."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._version import __version__
from ..agree.board import Document
from ..agree.compare import objection
from ..agree.limits import limit_of
from ..checkpoint.subject import Parameter, slots_of
from ..core.one_model import refuse_foreign
from ..core.ownership import Ownership
from ..core.strategy import Strategy, parts
from ..core.unsaved_state import refuse_unsaved_state
from ..errors import GradlaneError, InvalidValue
from ..lane.base import Lane
from ..lane.mesh_ranks import Mesh, backing
from ..lane.open import Opened, open_lane
from ..settings import Settings
from ..strategies.text import describe
from ..telemetry.ledger import Ledger
from ..telemetry.sink import RunInfo
from .kernels_in_use import kernels_on, prepare_kernels
from .on_devices import refuse_several_devices, refuse_sparse_gradients


def open_for(
    strategy: Strategy,
    module: nn.Module,
    parameters: list[Parameter],
    *,
    group: Any,
    device: torch.device,
    settings: Settings,
    ledger: Ledger,
    doing: str,
    must_agree: Document,
    gives: str,
    mesh: Mesh | None = None,
) -> Opened:
    """Open the lane; if ranks differ, or one of them objects to the strategy, all ranks raise."""
    prepare_kernels(strategy, device)
    run = RunInfo(group.rank(), group.size(), describe(strategy), kernels_on(device))
    with ledger.opening(run) as ready:  # all ranks learn of a file that one of them cannot write
        return open_lane(
            group,
            device,
            ledger,
            {
                "version": __version__,
                "strategy": describe(strategy, shared_only=True),
                "nonfinite": settings.nonfinite,
                "verify_every": settings.verify_every,
                **must_agree,
                "observer": ready,
            },
            parameters=list(map(str, parameters)),
            limit=limit_of(settings.timeout, backing(group), device),
            ranks_per_node=settings.ranks_per_node,
            mesh=mesh,
            against=objection(
                lambda: refuse_several_devices(module),
                lambda: refuse_sparse_gradients(module, device),
            )
            or objection_to(strategy, module, gives),
            enter=lambda scopes: strategy.enter(scopes, slots_of(parameters)),
            uses_nodes=any(part.uses_nodes for part in parts(strategy)),
            doing=doing,
        )


def objection_to(
    strategy: Strategy,
    model: nn.Module | None,
    gives: str = "gradients",
    ownership: Ownership | None = None,
) -> GradlaneError | None:
    """The error that keeps a strategy from this model on this rank. ``gives``: what the buckets will hold;
    ``ownership``: who may already use its state."""
    return objection(
        lambda: _refuse_buckets_of(strategy, gives),
        lambda: refuse_unsaved_state(strategy),
        lambda: refuse_foreign(strategy, model, ownership),
    )


def refuse_missing_groups(strategy: Strategy, lane: Lane) -> None:
    """On NCCL, groups for nodes are made when a strategy that needs them is attached."""
    nodes = [part for part in parts(strategy) if part.uses_nodes]
    if nodes and not lane.has_nodes:
        raise InvalidValue(
            f"{type(nodes[0]).__name__} needs process groups for nodes, and this attachment has none; attach "
            "it from the start: attach(model, 'After(1000, Hierarchical(...))')"
        )


def _refuse_buckets_of(strategy: Strategy, gives: str) -> None:
    if strategy.takes != gives:
        raise InvalidValue(
            f"{describe(strategy, short=True)} takes {strategy.takes}, and these buckets hold {gives}; give "
            "it to gradlane.local_steps(model, optimizer, strategy)"
        )
