"""Answers to requests, made of the own payload."""

from __future__ import annotations

from torch import Tensor

from ..core.collectives import Payload, Request

MOST_COPIES = 1 << 26  # bytes of distinct answers to one request; more would only fill the memory


def echoed(request: Request, size: int, place: int) -> object:
    if request.kind == "all_reduce":
        return request.payloads[0][0]
    if request.kind == "reduce_scatter":
        parts = request.payloads[0][0].view(size, -1)
        return [part.clone() for part in parts[: _distinct(parts[0].nbytes, size)]]
    own = request.payloads[0 if request.kind == "all_gather" else place]
    count = _distinct(sum(part.nbytes for part in own), size - 1)
    # What is sent to this rank itself is not filled, so it takes the payload for another one.
    filled = own if request.kind == "all_gather" or size == 1 else _fitting(request, own, place)
    copies = [tuple(part.clone() for part in filled) for _ in range(count)]
    return [own if peer == place else copies[peer % count] for peer in range(size)]


def _fitting(request: Request, own: Payload, place: int) -> Payload:
    """A payload for another rank that has the shapes of the own one; the own one if there is none."""
    shapes = [part.shape for part in own]
    for peer, payload in enumerate(request.payloads):
        if peer != place and [part.shape for part in payload] == shapes:
            return payload
    return own


def _distinct(size: int, most: int) -> int:
    return max(1, min(most, MOST_COPIES // max(size, 1)))


def summed(rows: object) -> Tensor:
    assert isinstance(rows, list)
    total: Tensor = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
