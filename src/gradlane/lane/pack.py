"""A payload of several tensors as one message, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.collectives import Payload


def message_of(payload: Payload) -> Tensor:
    """The payload's bytes in one row; a single tensor is viewed, several are copied together."""
    rows = [_bytes(payload[place]) for place in _order(payload)]
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def payload_of(message: Tensor, like: Payload) -> Payload:
    """Views into a message, shaped like a payload."""
    parts: dict[int, Tensor] = {}
    start = 0
    for place in _order(like):
        size = like[place].numel() * like[place].element_size()
        row = message[start : start + size]
        if row.storage_offset() % like[place].element_size():  # a message in the middle of a buffer
            row = row.clone()
        parts[place] = row.view(like[place].dtype).view(like[place].shape)
        start += size
    return tuple(parts[place] for place in range(len(like)))


def _order(payload: Payload) -> list[int]:
    """Wide elements first: then every part is aligned without a byte of padding."""
    return sorted(range(len(payload)), key=lambda place: -payload[place].element_size())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
