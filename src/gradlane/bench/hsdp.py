"""HSDP as an arm: FSDP2 shards a model within each node and replicates it across nodes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from ..core.collectives import Kind, Scope
from ..core.strategy import Strategy, parts
from ..ddp import attach
from ..errors import InvalidValue
from ..session import Session
from ..strategies.hierarchical import Hierarchical
from ..strategies.local_steps import LocalSteps
from ..strategies.text import parse
from .arms import HSDP, strategy_text
from .nodes import Nodes
from .traffic import Traffic

Payload = Callable[[int, int], int]
"""Bytes that a rank gives to a collective, from those of its output and the number of ranks."""
COLLECTIVES: dict[str, tuple[Kind, Payload]] = {
    "all_gather_single": ("all_gather", lambda output, size: output // size),
    "all_gather_into_tensor": ("all_gather", lambda output, size: output // size),  # before torch 2.13
    # Gloo's own reduce-scatter sends as much as an all-reduce.
    "reduce_scatter_single": ("all_reduce", lambda output, size: output * size),
    "reduce_scatter_tensor": ("all_reduce", lambda output, size: output * size),
    "all_reduce": ("all_reduce", lambda output, size: output),
}


class HsdpArm(Traffic):
    """A model on HSDP, with torch's own all-reduce across the nodes or with a strategy in its place."""

    def __init__(self, model: nn.Module, name: str, nodes: Nodes) -> None:
        super().__init__(nodes)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (nodes.count, nodes.per_node), mesh_dim_names=("nodes", "ranks"))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model
        self._groups: dict[Scope, Any] = {"node": mesh.get_group("ranks"), "cross": mesh.get_group("nodes")}
        for call, (kind, payload) in COLLECTIVES.items():
            if hasattr(dist, call):
                setattr(dist, call, self._counted(getattr(dist, call), kind, payload))
        self.attachment: Session | None = None
        if name != HSDP:
            self.attachment = attach(self.model, parse(strategy_text(name)), observer=self.on_event)

    def _counted(self, call: Callable[..., Any], kind: Kind, payload: Payload) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            output = args[0] if args else options["output"]
            for over, group in self._groups.items():
                if options.get("group") is group:  # not so for a strategy in its place, which counts itself
                    size = dist.get_world_size(group)
                    self.add(kind, payload(output.numel() * output.element_size(), size), size, over)
            return call(*args, **options)

        return counting


def load_fsdp() -> None:
    """Import FSDP2 before the ranks are forked: each of them would take seconds for it."""
    importlib.import_module("torch.distributed.fsdp")


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """What ``fully_shard`` gets, before the model itself: each child with parameters, and the elements of a
    ``ModuleList`` or a ``ModuleDict``, which is never called itself."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from blocks_of(child)
        elif any(True for _ in child.parameters()):
            yield child


def check_hsdp(name: str, strategy: Strategy | None, nodes: Nodes | None) -> None:
    """Refuse an arm on HSDP that cannot work."""
    if nodes is None:
        raise InvalidValue(
            f"arm {name!r} shards a model within nodes, and without --nodes there are none; "
            "add --nodes 2 --per-node 2"
        )
    if isinstance(strategy, LocalSteps):
        raise InvalidValue(f"arm {name!r}: local steps need the whole model on each rank; use them with DDP")
    if strategy is not None and has_hierarchical(strategy):
        raise InvalidValue(
            f"arm {name!r}: HSDP has the node's part already; write what is inside of Hierarchical(...)"
        )


def has_hierarchical(strategy: Strategy) -> bool:
    return any(isinstance(part, Hierarchical) for part in parts(strategy))
