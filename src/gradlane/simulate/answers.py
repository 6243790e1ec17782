"""What a collective answers, computed in one process: the plain meaning of each request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import Payload, Request
from ..errors import InvalidValue, RanksDisagree


def exchange(
    requests: Sequence[Request], buckets: Sequence[Bucket], received: list[Tensor] | None = None
) -> list[object]:
    """Answer the requests of all ranks of one scope, in rank order.

    ``received`` takes what came from other ranks: on a network it lies in buffers of the lane, which the next
    step uses again.
    """
    lent: list[Tensor] = [] if received is None else received
    _agreed(requests, buckets)
    first = requests[0]
    if first.kind == "all_reduce":
        return list(_all_reduce(requests, buckets))
    if first.kind == "all_gather":
        gathered = [request.payloads[0] for request in requests]
        return [
            [_received(p, rank == me, lent) for rank, p in enumerate(gathered)] for me in range(len(requests))
        ]
    if len(first.payloads) != len(requests):
        raise InvalidValue(
            f"all_to_all over {first.over} needs one payload for each of {len(requests)} ranks, "
            f"got {len(first.payloads)}"
        )
    return [
        [_received(request.payloads[me], rank == me, lent) for rank, request in enumerate(requests)]
        for me in range(len(requests))
    ]


def _received(payload: Payload, own: bool, lent: list[Tensor]) -> Payload:
    """A rank gets copies of the others' and its own as it is, as on a network."""
    if own:
        return payload
    copies = tuple(part.clone() for part in payload)
    lent.extend(copies)
    return copies


def _all_reduce(requests: Sequence[Request], buckets: Sequence[Bucket]) -> list[Tensor]:
    tensors = [request.payloads[0][0] for request in requests]
    op, over = requests[0].op, requests[0].over
    if op == "mean":
        for tensor, bucket in zip(tensors, buckets, strict=True):
            tensor.div_(bucket.divisor(over))
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op == "min":
            total = total.minimum(tensor)
        elif op == "max":
            total = total.maximum(tensor)
        else:
            total = total + tensor
    for tensor in tensors:  # in place, as the lanes do, so that a wrong alias shows here too
        tensor.copy_(total)
    return tensors


def _agreed(requests: Sequence[Request], buckets: Sequence[Bucket]) -> None:
    asked = [str(request) for request in requests]
    for rank, text in enumerate(asked):
        if text != asked[0] and not _sparse(requests):
            raise RanksDisagree(
                f"step {buckets[0].step}, bucket {buckets[0].index}: rank {buckets[0].rank} asks for "
                f"{asked[0]}, rank {buckets[rank].rank} for {text}; on a network this would hang"
            )


def _sparse(requests: Sequence[Request]) -> bool:
    return all(tensor.is_sparse for request in requests for tensor in request.tensors)
