"""The answer to each kind of request, computed in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.bucket import Bucket
from ..core.collectives import Payload, Request, check_parts
from ..errors import RanksDisagree


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
    check_parts(first, len(requests))
    if first.kind == "all_reduce":
        return list(_all_reduce(requests, buckets))
    if first.kind == "reduce_scatter":
        return list(_reduce_scatter(requests, buckets))
    if first.kind == "all_gather":
        gathered = [request.payloads[0] for request in requests]
        return [
            [_delivered(payload, rank == me, received) for rank, payload in enumerate(gathered)]
            for me in range(len(requests))
        ]
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


def _reduce_scatter(requests: Sequence[Request], buckets: Sequence[Bucket]) -> list[Tensor]:
    tensors = _divided(requests, buckets)
    wide = tensors[0].dtype if tensors[0].element_size() >= 4 else torch.float32
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    for tensor in tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else 0)  # as on a lane, it is not the sum
    return [part.to(tensors[0].dtype, copy=True) for part in total.view(len(requests), -1)]


def _divided(requests: Sequence[Request], buckets: Sequence[Bucket]) -> list[Tensor]:
    """The tensors of the requests; of a mean, each divided before the sum."""
    tensors = [request.payloads[0][0] for request in requests]
    if requests[0].op == "mean":
        for tensor, bucket in zip(tensors, buckets, strict=True):
            tensor.div_(bucket.divisor(requests[0].over))
    return tensors


def _all_reduce(requests: Sequence[Request], buckets: Sequence[Bucket]) -> list[Tensor]:
    tensors, op = _divided(requests, buckets), requests[0].op
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
