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
from torch.futures import Future

from ..core.collectives import Request, check_parts
from ..core.message import message_of, payload_of
from ..kernels.finite import divided
from ..torch_internals import default_group, reduce_scatter_base

CHUNK = 1 << 20  # bytes; one large message would fill a slow link unevenly
ABANDON_TIMEOUT = timedelta(seconds=0.1)  # for transfers of a failed step
SEVER_TIMEOUT = timedelta(milliseconds=10)
SEVER_TAG = 1  # messages have tag 0
PROBE_TAG = 1_000_003  # no rank receives with this tag
REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

BufferFor = Callable[[int, int], Tensor]


def plain_mean(group: Any, buffer: Tensor) -> Future[Tensor]:
    """DDP's own mean on DDP's own group, at the cost of torch's ``allreduce_hook``. That one divides; DDP
    without a hook multiplies by the reciprocal, and so does this: the bits are those of plain DDP."""
    future: Future[list[Tensor]] = group.allreduce([buffer.mul_(1 / group.size())], _SUM).get_future()
    return future.then(_first)


_SUM = dist.AllreduceOptions()


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


class Pending:
    """A request under way: the backend's works, and how to read the answer once they are done.

    A ``direct`` request consists of sends and receives. Their timeout counts from the moment of the wait, and
    a wait that times out ends the transfer. An all-reduce goes on until its own timeout, or until ``sever``.
    """

    def __init__(
        self, works: list[Any], read: Callable[[], object], *, direct: bool = False, bounded: bool = False
    ) -> None:
        self.bounded = bounded  # what this rank gave to a mean is bounded, as in ``Reduced.bounded``
        self._works = deque(works)
        self._read = read
        self._limit = (ABANDON_TIMEOUT,) if direct else ()

    def wait(self) -> object:
        while self._works:
            self._works.popleft().wait()  # removed first: a failed work must not be waited for again
        return self._read()

    def abandon(self) -> None:
        """Wait until all works have ended, in success or failure: then nothing writes to our tensors."""
        while self._works:
            with contextlib.suppress(RuntimeError):
                self._works.popleft().wait(*self._limit)


def issue(group: Any, request: Request, divisor: int, buffer_for: BufferFor) -> Pending:
    """Start a request on a group whose collectives complete on the host (Gloo).

    ``buffer_for(peer, numel)`` returns the buffer, in bytes, that receives the message of a peer.

    All-gathers and all-to-alls are direct sends in chunks, received at their final place. On Gloo they reach
    94 % of a 100 Mbit link, where Gloo's own all-gather reaches 64 to 79 %.
    """
    size = group.size()
    if request.kind == "all_reduce":
        tensor, bounded = _divided(request, divisor)
        works = [_reduce(group, tensor, request.op)] if size > 1 else []
        return Pending(works, lambda: tensor, bounded=bounded)
    check_parts(request, size)
    me = group.rank()
    if request.kind == "reduce_scatter":
        return _reduce_scatter(group, request, divisor, buffer_for)
    if request.kind == "all_gather":
        mine = request.payloads[0]
        outgoing = [message_of(mine)] * size
    else:
        mine = request.payloads[me]
        outgoing = [message_of(payload) for payload in request.payloads]
    incoming, works = _exchange(group, outgoing, me, buffer_for)
    return Pending(
        works,
        lambda: [mine if peer == me else payload_of(incoming[peer], mine) for peer in range(size)],
        direct=True,
    )


def commit(group: Any, step: int, flag: int) -> tuple[int, int, int]:
    """The first and the last step that any rank is in, and the largest flag of all ranks; returns when all
    ranks have called it."""
    bounds = torch.tensor([step, -step, flag])
    _reduce(group, bounds, "max").wait()
    last, first, flagged = bounds.tolist()
    return -first, last, flagged


def meet(limit: timedelta) -> None:
    """A barrier of the default group with a timeout of its own. Destroying a group waits for everything that
    the group has under way, and the group's own timeout may be half an hour."""
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
    """End everything that is under way on a Gloo group, here and at its peers.

    No call ends an all-reduce before its timeout. But a receive that times out closes every connection of its
    group. If there are several interfaces, Gloo takes turns between them, by tag.
    """
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    others = [peer for peer in range(group.size()) if peer != group.rank()]
    for tag in range(SEVER_TAG, SEVER_TAG + interfaces):
        for peer in others:  # a connection that is closed already closes no other
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(SEVER_TIMEOUT)


def is_closed(group: Any, peer: int) -> bool:
    """Whether the connection to a peer is closed: then a send fails at once. The peer never receives this
    message, so only its announcement is sent."""
    try:
        group.send([torch.zeros(1, dtype=torch.uint8)], peer, PROBE_TAG)
    except RuntimeError:
        return True
    return False


def reduce_on_stream(group: Any, tensor: Tensor, op: str) -> None:
    """An all-reduce on a group whose collectives run on the device, in place; this only orders streams."""
    _reduce(group, tensor, op).wait()


def perform_on_stream(group: Any, request: Request, divisor: int) -> object:
    """The same on a group whose collectives run on the device: ``wait`` only orders streams."""
    size = group.size()
    if request.kind == "all_reduce":
        tensor, _ = _divided(request, divisor)
        _reduce(group, tensor, request.op).wait()
        return tensor
    check_parts(request, size)
    if request.kind == "reduce_scatter":
        tensor, _ = _divided(request, divisor)
        part = tensor.new_empty(tensor.numel() // size)
        reduce_scatter_base(group, part, tensor).wait()
        return part
    if request.kind == "all_gather":
        mine = request.payloads[0]
        message = message_of(mine)
        received = torch.empty(size, message.numel(), dtype=torch.uint8, device=message.device)
        group.allgather([list(received.unbind())], [message]).wait()
        return [payload_of(row, mine) for row in received]
    mine = request.payloads[group.rank()]
    outgoing = [message_of(payload) for payload in request.payloads]
    received = torch.empty(size, message_of(mine).numel(), dtype=torch.uint8, device=outgoing[0].device)
    splits = [message.numel() for message in outgoing]
    width = received.shape[1]
    group.alltoall_base(received.view(-1), torch.cat(outgoing), [width] * size, splits).wait()
    return [payload_of(row, mine) for row in received]


def _divided(request: Request, divisor: int) -> tuple[Tensor, bool]:
    """What is sent, and whether it is known to be bounded."""
    (tensor,) = request.payloads[0]
    # Divide before the sum, as DDP does: the mean of representable numbers must not overflow.
    return tensor, request.op == "mean" and divided(tensor, divisor)


def _reduce(group: Any, tensor: Tensor, op: str | None) -> Any:
    how = dist.AllreduceOptions()
    how.reduceOp = REDUCE_OPS[op or "sum"]  # type: ignore[assignment]
    return group.allreduce([tensor], how)


def _reduce_scatter(group: Any, request: Request, divisor: int, buffer_for: BufferFor) -> Pending:
    """Direct sends, and a sum in rank order. Gloo's own sends as much as an all-reduce, twice of this."""
    tensor, bounded = _divided(request, divisor)
    parts = tensor.view(group.size(), -1).unbind()
    me = group.rank()
    incoming, works = _exchange(group, [part.view(torch.uint8) for part in parts], me, buffer_for)
    rows = [parts[me] if peer == me else incoming[peer].view(tensor.dtype) for peer in range(len(parts))]
    wide = tensor.dtype if tensor.element_size() >= 4 else torch.float32
    total = buffer_for(me, parts[me].numel() * wide.itemsize).view(wide)
    return Pending(works, lambda: _summed(rows, total), direct=True, bounded=bounded)


def _summed(rows: list[Tensor], total: Tensor) -> Tensor:
    """In rank order; a half-width format is rounded once, at the end."""
    total.copy_(rows[0])
    for row in rows[1:]:
        total += row
    return total if total.dtype == rows[0].dtype else total.to(rows[0].dtype)


def _exchange(
    group: Any, outgoing: list[Tensor], me: int, buffer_for: BufferFor
) -> tuple[dict[int, Tensor], list[Any]]:
    """Send ``outgoing[d]`` to rank d; the message of each peer is as large as this rank's own part."""
    size = len(outgoing)
    # Start with the next rank, not with rank 0: else all ranks would first send to the same one.
    peers = [(me + distance) % size for distance in range(1, size)]
    incoming = {peer: buffer_for(peer, outgoing[me].numel()) for peer in peers}
    works = [group.recv([piece], peer, 0) for peer in peers for piece in _pieces(incoming[peer])]
    works += [group.send([piece], peer, 0) for peer in peers for piece in _pieces(outgoing[peer])]
    return incoming, works


def _pieces(message: Tensor) -> tuple[Tensor, ...]:
    return torch.split(message, CHUNK) if message.numel() else ()
