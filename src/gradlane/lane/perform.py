"""The only file that calls a collective."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.collectives import Request
from ..core.message import message_of, payload_of
from ..errors import InvalidValue
from ..kernels.finite import divided
from ..torch_internals import default_group

CHUNK = 1 << 20  # bytes; one large message would fill a slow link unevenly
HASTE = timedelta(seconds=0.1)  # for transfers of a step that is lost
AT_ONCE = timedelta(milliseconds=10)
NO_TAG_OF_OURS = 1  # messages have 0
NOBODY_READS = 1_000_003
REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


Room = Callable[[int, int], Tensor]


class Pending:
    """A request under way: the backend's works, and how to read the answer once they are done.

    Of a ``direct`` one, Gloo counts the time-out from the moment it is waited for, and to give up waiting
    ends the transfer; an all-reduce has its own clock, and goes on until that has run out, or ``sever``.
    """

    def __init__(
        self, works: list[Any], read: Callable[[], object], *, direct: bool = False, bounded: bool = False
    ) -> None:
        self.bounded = bounded  # what this rank gave to a mean is finite, and small: ``Reduced.bounded``
        self._works = deque(works)
        self._read = read
        self._limit = (HASTE,) if direct else ()

    def wait(self) -> object:
        while self._works:
            self._works.popleft().wait()  # off the list first: one that failed must not be waited for again
        return self._read()

    def abandon(self) -> None:
        """Wait for the end of all works, good or bad: nothing may write to our tensors any more."""
        while self._works:
            with contextlib.suppress(RuntimeError):
                self._works.popleft().wait(*self._limit)


def issue(group: Any, request: Request, divisor: int, room: Room) -> Pending:
    """Start a request on a group whose collectives complete on the host (Gloo).

    ``room(peer, numel)`` is where what comes from a peer goes, as bytes.

    All-gathers and all-to-alls go as direct sends in chunks, received in their final place. On Gloo
    that reaches 94 % of a 100 Mbit link, where its own all-gather stays at 64 to 79 %.
    """
    size = group.size()
    if request.kind == "all_reduce":
        tensor, bounded = _divided(request, divisor)
        works = [_reduce(group, tensor, request.op)] if size > 1 else []
        return Pending(works, lambda: tensor, bounded=bounded)
    _counted(request, size)
    me = group.rank()
    if request.kind == "all_gather":
        mine = request.payloads[0]
        outgoing = [message_of(mine)] * size
    else:
        mine = request.payloads[me]
        outgoing = [message_of(payload) for payload in request.payloads]
    incoming, works = _exchange(group, outgoing, me, room)
    return Pending(
        works,
        lambda: [mine if peer == me else payload_of(incoming[peer], mine) for peer in range(size)],
        direct=True,
    )


def commit(group: Any, step: int, flag: int) -> tuple[int, int, int]:
    """The first and the last step any rank is in, and the largest flag of all ranks; returns only when all
    ranks came this far."""
    bounds = torch.tensor([step, -step, flag])
    _reduce(group, bounds, "max").wait()
    last, first, flagged = bounds.tolist()
    return -first, last, flagged


def meet(limit: timedelta) -> None:
    """A barrier of the default group that ends in time by itself: to destroy a group waits for all that it
    has under way, and the group's own time-out may be half an hour."""
    if "gloo" in str(dist.get_backend_config()):
        how = dist.BarrierOptions()
        how.timeout = limit
        how.device = torch.device("cpu")
        how.asyncOp = True
        work = default_group().barrier(how)
    else:
        work = dist.barrier(async_op=True)
    if work is not None:
        work.wait(limit)


def sever(group: Any) -> None:
    """End all that is under way on a group of Gloo, here at once, and let its peers find it closed.

    An all-reduce has its own clock, and no call that would end it; but a receive that has run out of time
    closes every connection of its group. Where there are several interfaces Gloo takes them in turns, by tag.
    """
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    others = [peer for peer in range(group.size()) if peer != group.rank()]
    for tag in range(NO_TAG_OF_OURS, NO_TAG_OF_OURS + interfaces):
        for peer in others:  # those that are closed already close no other
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(AT_ONCE)


def is_closed(group: Any, peer: int) -> bool:
    """Whether the connection to a peer is closed: to begin a message fails at once then. Nobody reads it, and
    until it is read only its announcement goes out."""
    try:
        group.send([torch.zeros(1, dtype=torch.uint8)], peer, NOBODY_READS)
    except RuntimeError:
        return True
    return False


def perform_on_stream(group: Any, request: Request, divisor: int) -> object:
    """The same on a group whose collectives run on the device: ``wait`` only orders streams."""
    size = group.size()
    if request.kind == "all_reduce":
        tensor, _ = _divided(request, divisor)
        _reduce(group, tensor, request.op).wait()
        return tensor
    _counted(request, size)
    if request.kind == "all_gather":
        mine = request.payloads[0]
        message = message_of(mine)
        received = torch.empty(size, message.numel(), dtype=torch.uint8, device=message.device)
        group.allgather([list(received.unbind())], [message]).wait()
        return [payload_of(row, mine) for row in received]
    mine = request.payloads[group.rank()]
    outgoing = [message_of(payload) for payload in request.payloads]
    received = torch.empty(size, message_of(mine).numel(), dtype=torch.uint8, device=mine[0].device)
    splits = [message.numel() for message in outgoing]
    width = received.shape[1]
    group.alltoall_base(received.view(-1), torch.cat(outgoing), [width] * size, splits).wait()
    return [payload_of(row, mine) for row in received]


def _divided(request: Request, divisor: int) -> tuple[Tensor, bool]:
    """What goes out, and whether it is known to be bounded."""
    (tensor,) = request.payloads[0]
    # Before the sum, as DDP does: the mean of representable numbers must not overflow on the way.
    return tensor, request.op == "mean" and divided(tensor, divisor)


def _reduce(group: Any, tensor: Tensor, op: str | None) -> Any:
    how = dist.AllreduceOptions()
    how.reduceOp = REDUCE_OPS[op or "sum"]  # type: ignore[assignment]
    return group.allreduce([tensor], how)


def _counted(request: Request, size: int) -> None:
    if request.kind == "all_to_all" and len(request.payloads) != size:
        raise InvalidValue(
            f"all_to_all over {request.over} needs one payload for each of {size} ranks, "
            f"got {len(request.payloads)}"
        )


def _exchange(group: Any, outgoing: list[Tensor], me: int, room: Room) -> tuple[dict[int, Tensor], list[Any]]:
    """Send ``outgoing[d]`` to rank d; what will come from each other rank is as large as my own part."""
    size = len(outgoing)
    # Start with the next rank, not with rank 0: else all would send to the same one at first.
    peers = [(me + distance) % size for distance in range(1, size)]
    incoming = {peer: room(peer, outgoing[me].numel()) for peer in peers}
    works = [group.recv([piece], peer, 0) for peer in peers for piece in _pieces(incoming[peer])]
    works += [group.send([piece], peer, 0) for peer in peers for piece in _pieces(outgoing[peer])]
    return incoming, works


def _pieces(message: Tensor) -> tuple[Tensor, ...]:
    return torch.split(message, CHUNK) if message.numel() else ()
