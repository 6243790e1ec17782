"""The answer to each kind of request, computed in one process."""

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

    The tensors that came from other ranks are added to ``received``: on a network they are in buffers of the
    lane, which the next step uses again.
    """
    received = [] if received is None else received
    _check_equal(requests, buckets)
    first = requests[0]
    if first.kind == "all_reduce":
        return list(_all_reduce(requests, buckets))
    if first.kind == "all_gather":
        gathered = [request.payloads[0] for request in requests]
        return [
            [_delivered(payload, rank == me, received) for rank, payload in enumerate(gathered)]
            for me in range(len(requests))
        ]
    if len(first.payloads) != len(requests):
        raise InvalidValue(
            f"all_to_all over {first.over} needs one payload for each of {len(requests)} ranks, "
            f"got {len(first.payloads)}"
        )
    return [
        [_delivered(request.payloads[me], rank == me, received) for rank, request in enumerate(requests)]
        for me in range(len(requests))
    ]


def _delivered(payload: Payload, own: bool, received: list[Tensor]) -> Payload:
    """As on a network, a rank gets copies of the others' payloads, and its own payload itself."""
    if own:
        return payload
    copies = tuple(part.clone() for part in payload)
    received.extend(copies)
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
    for tensor in tensors:  # in place, as on a lane: so a strategy that reads its old tensor fails here too
        tensor.copy_(total)
    return tensors


def _check_equal(requests: Sequence[Request], buckets: Sequence[Bucket]) -> None:
    texts = [str(request) for request in requests]
    for rank, text in enumerate(texts):
        if text != texts[0] and not _sparse(requests):
            raise RanksDisagree(
                f"step {buckets[0].step}, bucket {buckets[0].index}: rank {buckets[0].rank} asks for "
                f"{texts[0]}, rank {buckets[rank].rank} for {text}; on a network this would hang"
            )


def _sparse(requests: Sequence[Request]) -> bool:
    return all(tensor.is_sparse for request in requests for tensor in request.tensors)
