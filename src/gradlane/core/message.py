"""A payload of several tensors as one message, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .collectives import Payload

PayloadLayout = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of a payload."""


def message_of(payload: Payload) -> Tensor:
    """The payload's bytes in one row: a view where they lie side by side, as ``payload_in`` makes them."""
    rows = [_bytes(payload[index]) for index in _widest_first([part.dtype for part in payload])]
    rows = [row for row in rows if row.numel()]
    if not rows:
        return torch.empty(0, dtype=torch.uint8, device=payload[0].device if payload else None)
    return rows[0] if len(rows) == 1 else _viewed(rows) if _adjacent(rows) else torch.cat(rows)


def payload_of(message: Tensor, like: Payload) -> Payload:
    """Views into a message, shaped like a payload."""
    return payload_in(message, [(tuple(part.shape), part.dtype) for part in like])


def payload_in(message: Tensor, layout: PayloadLayout) -> Payload:
    """Views into a message, of these shapes and dtypes."""
    parts: dict[int, Tensor] = {}
    start = 0
    for index in _widest_first([dtype for _, dtype in layout]):
        shape, dtype = layout[index]
        size = torch.Size(shape).numel() * dtype.itemsize
        row = message[start : start + size]
        if row.storage_offset() % dtype.itemsize:  # a message in the middle of a buffer
            row = row.clone()
        parts[index] = row.view(dtype).view(shape)
        start += size
    return tuple(parts[index] for index in range(len(layout)))


def message_size(layout: PayloadLayout) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)


def _widest_first(dtypes: Sequence[torch.dtype]) -> list[int]:
    """Indices by width, wide elements first: then every part is aligned without padding."""
    return sorted(range(len(dtypes)), key=lambda index: -dtypes[index].itemsize)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _adjacent(rows: Sequence[Tensor]) -> bool:
    storage, end = rows[0].untyped_storage().data_ptr(), rows[0].storage_offset()
    for row in rows:
        if row.untyped_storage().data_ptr() != storage or row.storage_offset() != end:
            return False
        end += row.numel()
    return rows[0].device.type != "meta"


def _viewed(rows: Sequence[Tensor]) -> Tensor:
    return rows[0].as_strided((sum(row.numel() for row in rows),), (1,), rows[0].storage_offset())
