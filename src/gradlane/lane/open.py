"""Choose and open the lane for a process group."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..agree.board import Board, Document
from ..agree.compare import as_note, objection, refuse_differences, refuse_objections
from ..agree.limits import Limit
from ..core.collectives import Scope
from ..core.events import Listener
from ..core.scopes import Scopes, members_of, scopes_among
from ..errors import GradlaneError, InvalidValue, WrongState
from ..torch_internals import store_of_group
from .base import Lane, collect_dropped_lanes
from .gloo_scheduling import check_choice
from .mesh_ranks import Mesh, backing
from .nodes import nodes_of, scope_groups
from .one_rank import OneRank
from .peers import Peers
from .stream import StreamLane
from .thread import ThreadLane

HOST_BACKENDS = ("gloo",)
STREAM_BACKENDS = ("nccl", "xccl", "fake")

_opened: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # lanes opened so far, by group


@dataclass(frozen=True)
class Opened:
    lane: Lane
    board: Board
    scopes: Scopes


def _any_scopes(scopes: Scopes) -> None:
    """Of a user of the lane that asks over the world only."""


def open_lane(
    group: Any,
    device: torch.device,
    listener: Listener,
    must_agree: Document,
    *,
    parameters: list[str],
    limit: Limit,
    ranks_per_node: int | None = None,
    mesh: Mesh | None = None,
    against: GradlaneError | None = None,
    enter: Callable[[Scopes], None] = _any_scopes,
    uses_nodes: bool = False,
    doing: str,
) -> Opened:
    """Compare ``must_agree`` and ``parameters`` over all ranks of the group, then connect. If they differ, if
    a rank has something ``against`` it, or if ``enter`` refuses the scopes on a rank, all ranks raise.
    ``uses_nodes``: requests may be over other scopes than the world. Scopes are those of the ``mesh``, if
    there is one, and nodes otherwise."""
    backend = backend_of(group, device)
    if backend == "fake":  # torch's stand-in for tests of control flow: it has no peers
        if against is not None:
            raise against
        nodes = nodes_of([""] * group.size(), ranks_per_node)
        scopes = scopes_among(group.rank(), mesh.members if mesh else members_of(group.rank(), nodes))
        enter(scopes)
        board = Board(dist.HashStore(), "alone", 0, 1, limit)
        groups = _stream_groups(group, mesh, nodes, scopes, limit, uses_nodes)
        return Opened(StreamLane(groups, device, listener, board), board, scopes)
    collect_dropped_lanes()
    serial = _opened.get(group, 0) + 1
    board = Board(store_of(group), f"gradlane/{serial}", group.rank(), group.size(), limit)
    must_agree = {
        **must_agree,
        "parameters": _digest(parameters),
        "ranks_per_node": ranks_per_node,
    }
    against = against or objection(check_choice)
    own = {"objection": as_note(against), "host": socket.gethostname()}
    token, notes = board.agree("open", {**must_agree, **own}, doing=doing)
    _opened[group] = serial  # only now: if a rank never came, all ranks try again with the same serial
    refuse_objections(notes, against, doing)
    board = board.corner(token)
    if len({note["parameters"] for note in notes}) > 1:  # then the long list is worth sending
        _, notes = board.agree("parameters", {**must_agree, "parameters": parameters}, doing=doing)
    refuse_differences(notes, tuple(must_agree), doing)
    nodes = nodes_of([note["host"] for note in notes], ranks_per_node)
    members = mesh.members if mesh else members_of(board.rank, nodes)
    scopes = scopes_among(board.rank, members)
    refusal = objection(lambda: enter(scopes))
    _, notes = board.agree("enter", {"objection": as_note(refusal)}, doing=doing)
    refuse_objections(notes, refusal, doing)
    if backend in STREAM_BACKENDS:
        groups = _stream_groups(group, mesh, nodes, scopes, limit, uses_nodes)
        return Opened(StreamLane(groups, device, listener, board), board, scopes)
    peers = Peers(board, members)
    peers.group("world", "first", 0)
    board.gone = peers.gone
    return Opened(ThreadLane(peers, listener, name=f"gradlane-{serial}"), board, scopes)


def _stream_groups(
    group: Any, mesh: Mesh | None, nodes: list[list[int]], scopes: Scopes, limit: Limit, uses_nodes: bool
) -> Mapping[Scope, Any]:
    """torch's own groups, for a backend whose collectives run on the device."""
    if mesh is not None:
        return mesh.groups
    if uses_nodes:
        return scope_groups(group, nodes, scopes, limit.seconds)
    return {"world": group}


def _digest(lines: list[str]) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()


def backend_of(group: Any, device: torch.device) -> str:
    """The backend that serves this device; says what to use instead where none fits."""
    if isinstance(group, OneRank):
        return "fake"  # it has no peers either
    config = str(dist.get_backend_config(backing(group)))
    served = dict(pair.split(":") for pair in config.split(",")) if ":" in config else {}
    backend = served.get(device.type, config)
    if backend in HOST_BACKENDS and device.type != "cpu":
        raise InvalidValue(
            f"the model is on {device.type}, its process group on {backend}; "
            "use init_process_group('nccl') for a model on CUDA"
        )
    if backend == "mpi":
        raise InvalidValue(
            "MPI process groups have no store through which the ranks could agree; "
            "use init_process_group('gloo')"
        )
    if backend not in HOST_BACKENDS + STREAM_BACKENDS:
        raise InvalidValue(
            f"backend {backend!r} is not known; gradlane runs on {', '.join(HOST_BACKENDS + STREAM_BACKENDS)}"
        )
    return backend


def store_of(group: Any) -> dist.Store:
    try:
        return store_of_group(group)
    except KeyError:
        raise WrongState("the process group was destroyed; init it again before attach") from None
